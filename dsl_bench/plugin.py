"""What authors of backends, workloads and kernels import. Pinned by a test of ``__all__``."""

from dsl_bench.backend import API_VERSION, Artifact, Availability, Backend, Target
from dsl_bench.codegen import cubin_facts
from dsl_bench.errors import KernelFault, UsageError
from dsl_bench.kernel import Call, Config, Kernel, Needs, Static
from dsl_bench.workload import DTYPES, Bound, Case, TensorSpec, Workload, int_list, positive_int

__all__ = [
    "API_VERSION",
    "DTYPES",
    "Artifact",
    "Availability",
    "Backend",
    "Bound",
    "Call",
    "Case",
    "Config",
    "Kernel",
    "KernelFault",
    "Needs",
    "Static",
    "Target",
    "TensorSpec",
    "UsageError",
    "Workload",
    "cubin_facts",
    "int_list",
    "positive_int",
]
