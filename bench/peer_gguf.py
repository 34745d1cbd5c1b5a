"""A .gguf file without quantisation, so that peers that read GGUF run the weights that verdraft runs.

Knows no model: metadata and tensors are copied as they are.
"""

from pathlib import Path
from typing import Literal

import gguf
import numpy as np

_FILE_TYPE = "general.file_type"
_NOT_COPIED = ("GGUF.", "general.architecture", _FILE_TYPE)  # the writer's own


def write_floats(source: Path, target: Path, dtype: Literal["float32", "float16"]) -> None:
    """Dequantise `source` into `target`. float16 leaves vectors (norms) in float32, as other converters do."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith(_NOT_COPIED):
            item_type = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], item_type)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32 if dtype == "float32" else gguf.LlamaFileType.MOSTLY_F16)
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, values.astype(dtype if values.ndim > 1 else np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
