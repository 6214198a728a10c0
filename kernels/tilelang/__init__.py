"""The TileLang kernels; imports as ``dsl_bench.kernels.tilelang``."""

if __name__ == "tilelang":
    raise ImportError(
        "dsl_bench's folder kernels/ stands on sys.path, so its tilelang/ hides the real TileLang: "
        "take it off sys.path (nothing under kernels/ is run as a script)"
    )
