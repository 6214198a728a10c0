"""A PTX text as statements and labels."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass
class Instruction:
    op: str
    args: tuple[str, ...]
    guard: str = ""


def split(text: str) -> tuple[str, ...]:
    """Operands, of which those in braces or brackets stay together."""
    parts, depth, at = [], 0, 0
    for i, ch in enumerate(text):
        depth += (ch in "{[") - (ch in "}]")
        if ch == "," and depth == 0:
            parts.append(text[at:i].strip())
            at = i + 1
    parts.append(text[at:].strip())
    return tuple(p for p in parts if p)


class Program:
    """The statements of the one kernel in a PTX text, and where its labels are."""

    def __init__(self, ptx: str) -> None:
        body = re.sub(r"//[^\n]*|^\s*\.loc\s[^\n]*", "", ptx, flags=re.M)
        head = re.search(r"\.visible \.entry (\w+)\(", body)
        assert head, "no kernel"
        self.name = head.group(1)
        start = body.index("\n{", head.end())
        end = body.index("$L__func_end0:", start)
        self.threads = int(re.search(r"\.reqntid (\d+)", body).group(1))  # type: ignore[union-attr]
        self.code: list[Instruction] = []
        self.labels: dict[str, int] = {}
        self.tables: dict[str, list[str]] = {}
        self._scopes: list[tuple[int, set[str]]] = []
        self._count = 0
        # braces that stand alone open and close the scope of a text of inline PTX
        for chunk in re.split(r"(^\s*[{}]\s*$)|;", body[start + 2 : end], flags=re.M):
            if chunk and chunk.strip():
                self._statement(chunk.strip())

    def _statement(self, text: str) -> None:
        if text == "{":
            self._count += 1
            self._scopes.append((self._count, set()))
            return
        if text == "}":
            self._scopes.pop()
            return
        while label := re.match(r"([$\w]+):\s*", text):
            text = text[label.end() :]
            if text.startswith(".branchtargets"):
                self.tables[label.group(1)] = [t.strip() for t in text.split(None, 1)[1].split(",")]
                return
            self.labels[self._local(label.group(1), declare=True)] = len(self.code)
        if not text:
            return
        if text.startswith(".reg"):
            if self._scopes:
                for name in text.split(None, 2)[2].split(","):
                    self._local(name.strip(), declare=True)
            return
        guard = ""
        if text.startswith("@"):
            guard, text = text[1:].split(None, 1)
            guard = "!" + self._local(guard[1:]) if guard.startswith("!") else self._local(guard)
        op, *rest = text.split(None, 1)
        args = split(rest[0]) if rest else ()
        self.code.append(Instruction(op, tuple(self._locals(a) for a in args), guard))

    def _local(self, name: str, declare: bool = False) -> str:
        """A name of the innermost text of inline PTX that declares it, as it is called here."""
        if declare and self._scopes:
            self._scopes[-1][1].add(name)
        for number, names in reversed(self._scopes):
            if name in names:
                return f"{name}@{number}"
        return name

    def _locals(self, operand: str) -> str:
        return re.sub(r"(?<![%$\w.])[A-Za-z_]\w*", lambda m: self._local(m.group()), operand)
