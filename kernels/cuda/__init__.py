"""The CUDA kernels; imports as ``dsl_bench.kernels.cuda``. Device code in .cu, its helpers in .cuh."""

if __name__ == "cuda":
    raise ImportError(
        "dsl_bench's folder kernels/ stands on sys.path, so its cuda/ hides the real cuda package: "
        "take it off sys.path (nothing under kernels/ is run as a script)"
    )
