"""Launches a kernel that was compiled for the CPU, in a process of its own: one that writes where it must
not, or waits for ever, ends this process and no other.

``launch.py JOB``, a JSON file with ``library``; ``arrays``, files, of which the last is the output; ``maps``,
tensor maps in hex, whose first eight bytes are for the address of an array: of each in order, or of those
that ``of`` numbers; ``shape``, grid, cluster, threads and shared memory; ``numbers``, the kernel's integers;
``seeds``, of one launch each. What the launch with seed 3 leaves in the output is ``out.3`` beside the job.
"""

from __future__ import annotations

import ctypes
import json
import struct
import sys
from pathlib import Path


def main(job: Path) -> None:
    given = json.loads(job.read_text())
    library = ctypes.CDLL(given["library"])
    contents = [Path(name).read_bytes() for name in given["arrays"]]
    arrays = [ctypes.create_string_buffer(content, len(content)) for content in contents]
    maps = b"".join(
        struct.pack("<Q", ctypes.addressof(arrays[i])) + bytes.fromhex(text)[8:]
        for i, text in zip(given.get("of", range(len(arrays))), given["maps"], strict=True)
    )
    raw = ctypes.create_string_buffer(len(maps) + 64)
    place = -(-ctypes.addressof(raw) // 64) * 64
    ctypes.memmove(place, maps, len(maps))
    numbers = (ctypes.c_int * len(given["numbers"]))(*given["numbers"])
    for seed in given["seeds"]:
        ctypes.memmove(arrays[-1], contents[-1], len(contents[-1]))
        library.run(*given["shape"], seed, ctypes.c_void_p(place), numbers)
        job.with_name(f"out.{seed}").write_bytes(arrays[-1].raw)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
