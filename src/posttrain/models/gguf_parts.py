"""Models that llama.cpp has split into several GGUF files.

    name-00001-of-00003.gguf   the configuration, the tokenizer, and the first tensors
    name-00002-of-00003.gguf   further tensors, and nothing else

transformers reads one file, and draws at random what it does not hold: the parts are joined before.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from gguf import GGUFReader, GGUFValueType, GGUFWriter, Keys

from posttrain.types import UserError

_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


def parts_of(file: Path) -> list[Path]:
    """Return all files of the model that a GGUF file belongs to, in order; UserError if one is missing."""
    named = _PART.fullmatch(file.name)
    if named is None:
        return [file]
    parts = [
        file.with_name(f"{named[1]}-{number:05d}-of-{named[3]}.gguf")
        for number in range(1, int(named[3]) + 1)
    ]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UserError(
            str(file),
            f"is one of {len(parts)} parts of a model, and {missing[0]}{more} is not in its directory",
            "download all parts into one directory",
        )
    return parts or [file]


def join_parts(parts: Sequence[Path], out: Path) -> None:
    """Write one GGUF file with the metadata of the first part and the tensors of all.

    Raises UserError if the parts do not hold as many tensors as the first says that the model has.
    """
    readers = [GGUFReader(part) for part in parts]
    fields = readers[0].fields
    writer = GGUFWriter(out, arch=str(fields[Keys.General.ARCHITECTURE].contents()))
    split = {Keys.Split.LLM_KV_SPLIT_NO, Keys.Split.LLM_KV_SPLIT_COUNT, Keys.Split.LLM_KV_SPLIT_TENSORS_COUNT}
    written_anew = {*split, Keys.General.ARCHITECTURE, Keys.General.ALIGNMENT}
    for key, field in fields.items():
        # the writer has no form for an empty list
        if key.startswith("GGUF.") or key in written_anew or not len(field.data):
            continue
        items = field.types[-1] if field.types[0] is GGUFValueType.ARRAY else None
        writer.add_key_value(key, field.contents(), field.types[0], items)
    tensors = {tensor.name: tensor for reader in readers for tensor in reader.tensors}
    expected = fields.get(Keys.Split.LLM_KV_SPLIT_TENSORS_COUNT)
    if expected is not None and expected.contents() != len(tensors):
        raise UserError(
            str(parts[0]),
            f"the model has {expected.contents()} tensors, and its {len(parts)} parts hold {len(tensors)}",
            "download all parts of one and the same model",
        )
    for tensor in tensors.values():
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
