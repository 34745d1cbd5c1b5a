"""From the name a user gives to a folder on disk: demo model, folder, .gguf file or hub id. Reads no weights."""

from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError
from tqdm import tqdm

from verdraft.model.demo import DEMO_NAME, demo_model
from verdraft.model.errors import ModelError
from verdraft.model.gguf_import import import_gguf

_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]
_NOT_HUB_FILES = ["*/*", "consolidated*"]  # other formats of the same weights


def resolve_model(name: str | None, progress: bool = True) -> Path:
    """The Hugging Face folder of a model, fetched or converted into the user's cache when needed.

    `name` is None or "demo" (the demo model), a folder, a .gguf file, or a hub id such as "Qwen/Qwen3-0.6B".
    Raises ModelError when there is no such model, or it cannot be fetched.
    """
    if name is None or name == "demo":
        return demo_model(progress)
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        return import_gguf(path, progress)
    return _checked_folder(path) if path.is_dir() else _from_hub(name, progress)


def served_name(name: str | None) -> str:
    """The model's name in the API: "SmolLM2-135M-Instruct" for the demo, a path's base name, a hub id as it is."""
    if name is None or name == "demo":
        return DEMO_NAME
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        return path.stem
    return path.resolve().name if path.is_dir() else name


def _checked_folder(folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        raise ModelError(f"the folder {folder} holds no config.json, so it is no Hugging Face model")
    if not any(folder.glob("*.safetensors")):
        raise ModelError(f"the folder {folder} holds no .safetensors weights (pickle weights are not loaded)")
    return folder


class _QuietBar(tqdm):  # type: ignore[type-arg]  # generic in its stubs only
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "disable": True})


def _from_hub(name: str, progress: bool) -> Path:
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise ModelError(f"there is no model {name!r}: expected a folder, a .gguf file or a hub id such as owner/name")
    try:
        return _checked_folder(Path(_download(name, progress)))
    except HFValidationError as error:
        raise ModelError(f"there is no model {name!r}: no such folder, and not a valid hub id") from error
    except RepositoryNotFoundError as error:
        raise ModelError(f"there is no model {name!r} on the hub (or it needs a token: set HF_TOKEN)") from error
    except LocalEntryNotFoundError as error:
        raise ModelError(f"cannot reach the hub for {name!r}, and no copy of it is in the local cache") from error
    except (HfHubHTTPError, OSError) as error:
        raise ModelError(f"cannot fetch {name!r} from the hub: {str(error).splitlines()[0]}") from error


def _download(name: str, progress: bool) -> str:
    bar: Any = None if progress else _QuietBar
    return snapshot_download(name, allow_patterns=_HUB_FILES, ignore_patterns=_NOT_HUB_FILES, tqdm_class=bar)
