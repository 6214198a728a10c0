"""The backends that come with dsl_bench, one file each; reached through entry points only."""
