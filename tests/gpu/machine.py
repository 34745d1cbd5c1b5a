"""Prints what a GPU machine has, importing no more of the project than its kernels."""

import importlib
import platform
import sys

import torch

from verdraft.kernels.chooser import Wish, survey, versions

OTHERS = ("pytest", "safetensors", "transformers", "llguidance", "huggingface_hub", "gguf", "tqdm")


def main() -> None:
    print(f"Python {sys.version.split()[0]}, {platform.platform()}")
    for name, version in versions().items():
        print(f"{name}: {version or 'not installed'}")
    for name in OTHERS:
        try:
            print(f"{name}: {getattr(importlib.import_module(name), '__version__', 'there')}")
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {error}")
    print(f"CUDA {torch.version.cuda}, available: {torch.cuda.is_available()}")
    for index in range(torch.cuda.device_count()):
        print(torch.cuda.get_device_properties(index))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for deterministic in (False, True):
        wish = Wish(device, torch.bfloat16, deterministic=deterministic)
        for name, reason in survey(wish).items():
            print(f"{name} for {wish}: {reason or 'yes'}")


if __name__ == "__main__":
    main()
