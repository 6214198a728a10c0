"""One run of a call, seen as whatever comes next on the current stream sees it. Imported in workers only.

A kernel that works on another stream, and neither waits for the current one nor lets that wait for it, is
right after a wait for the whole device and wrong in every program. So the outputs are poisoned behind a delay
on the current stream: a kernel that does not wait runs before, and is overwritten. And they are looked at on
the current stream before anything waits for the device: what nobody waits for is not there yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dsl_bench import check
from dsl_bench.errors import KernelFault
from dsl_bench.gpu import Device
from dsl_bench.kernel import Call

#: ns for which the poison is held back: much longer than a launch takes
ORDER_NS = 2e6


def observed(call: Call, outputs: Mapping[str, Any], device: Device | None) -> Mapping[str, Any]:
    """The outputs of one run on poisoned memory, everything waited for. ``device`` is None on the host.

    KernelFault ``unwritten`` (check ``stream``) where the work is there in the end, but not in its turn."""
    if device is None:
        check.poison(outputs)
        return _given(call, call.run(), outputs)
    device.synchronize()
    device.delay(ORDER_NS)
    check.poison(outputs)
    given = _given(call, call.run(), outputs)
    in_turn = [check.still_poisoned(tensor) for tensor in given.values()]
    device.synchronize()
    missing = sum(int(count) for count in in_turn)
    left = sum(check.unwritten(tensor) for tensor in given.values())
    if missing and (not left or _written_if_waited_for(call, outputs, device)):
        reason = f"{missing} elements are not there when the current stream comes to them"
        raise KernelFault("unwritten", f"{reason}: the kernel works on another stream", "stream")
    return given


def _given(call: Call, returned: Mapping[str, Any] | None, outputs: Mapping[str, Any]) -> Mapping[str, Any]:
    return dict(returned) if call.allocates and returned is not None else outputs


def _written_if_waited_for(call: Call, outputs: Mapping[str, Any], device: Device) -> bool:
    check.poison(outputs)
    device.synchronize()
    given = _given(call, call.run(), outputs)
    device.synchronize()
    return not any(check.unwritten(tensor) for tensor in given.values())
