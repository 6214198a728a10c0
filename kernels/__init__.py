"""The kernels of the compared languages; imports as ``dsl_bench.kernels``, one folder a language."""

if __name__ == "kernels":
    raise ImportError(
        "the folder kernels/ of dsl_bench was found as a top-level package named 'kernels': "
        "import dsl_bench.kernels instead, and take the folder above it off sys.path"
    )
