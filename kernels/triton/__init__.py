"""The Triton kernels; imports as ``dsl_bench.kernels.triton``."""

if __name__ == "triton":
    raise ImportError(
        "dsl_bench's folder kernels/ stands on sys.path, so its triton/ hides the real Triton: "
        "take it off sys.path (nothing under kernels/ is run as a script)"
    )
