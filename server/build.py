"""From settings to a service: device, kernels, model, KV pool, engine, text. Everything heavy is imported here."""

import os
import re
import time
from pathlib import Path

import psutil
import torch

from verdraft.kernels.base import Kernels
from verdraft.kernels.chooser import choose_kernels
from verdraft.model.eagle import EagleHead
from verdraft.model.eagle_file import load_eagle, shipped_eagle
from verdraft.model.errors import ModelError
from verdraft.model.exit_file import load_exits, shipped_exits
from verdraft.model.exit_head import Exits, own_exits
from verdraft.model.load import load_model
from verdraft.model.parallel import Job, load_parallel
from verdraft.model.recordings import CudaRecorder, RecordedTransformer, eagle_with_recordings, with_recordings
from verdraft.model.source import resolve_model, served_name
from verdraft.model.transformer import Transformer
from verdraft.scheduler.async_engine import AsyncEngine
from verdraft.scheduler.config import DraftShape, EngineConfig
from verdraft.scheduler.engine import Engine
from verdraft.scheduler.request import EXIT_MODES
from verdraft.server.build_predictor import add_predictor, learners
from verdraft.server.build_suffix import keepers
from verdraft.server.chat_template import ChatTemplate
from verdraft.server.grammars import Grammars
from verdraft.server.requests import Limits
from verdraft.server.service import Service, Text, TextWorkers
from verdraft.server.settings import Settings, SettingsError
from verdraft.server.tokenizer import TextTokenizer

CPU_FRACTION, GPU_FRACTION = 0.1, 0.85  # of the free memory, unless --memory-fraction says otherwise


def build_service(settings: Settings) -> Service:
    """Takes seconds. Raises ModelError, KernelUnavailable or SettingsError: one sentence each."""
    path = resolve_model(settings.model)
    engine = build_engine(settings, path)
    text = build_text(path, engine.config.eos_token_ids)
    add_predictor(engine, text, settings)
    limits = Limits(
        model=settings.served_model_name or served_name(settings.model),
        vocab_size=text.tokenizer.vocab_size,
        max_model_len=engine.config.max_model_len,
        modes=engine.modes,
        test_hooks=os.environ.get("VERDRAFT_TEST_HOOKS") == "1",
    )
    return Service(
        limits=limits,
        config=engine.config,
        text=text,
        engine=AsyncEngine(engine),
        workers=TextWorkers(),
        created=int(time.time()),
        companions=(*learners(engine, settings), *keepers(engine, limits.vocab_size, settings, path)),
    )


def build_text(path: Path, eos: frozenset[int]) -> Text:
    """The text side of the model in `path`. Raises ModelError."""
    tokenizer = TextTokenizer(path)
    return Text(tokenizer, ChatTemplate(path, tokenizer), eos, Grammars(tokenizer, eos))


def build_engine(settings: Settings, path: Path) -> Engine:
    """The model in `path`, loaded, with a KV pool. Raises ModelError, KernelUnavailable or SettingsError."""
    _set_threads(settings)
    device = _device(settings)
    dtype = _dtype(settings, device)
    kernels = choose_kernels(
        settings.kernels, device, dtype, settings.quantization, settings.deterministic, settings.activations
    )
    _block_size(settings, kernels)
    model = _recorded(settings, _loaded(settings, path, kernels, dtype, device))
    exits = _exits(settings, model, path)
    eagle = _eagle(settings, model, path)
    if eagle and isinstance(model, RecordedTransformer):
        eagle = eagle_with_recordings(eagle, model.recordings.recorder)
    _check_mode(settings, exits, eagle)
    engine = Engine(model, _engine_config(settings, model, eagle), exits=exits, eagle=eagle)
    engine.measure()
    return engine


def _set_threads(settings: Settings) -> None:
    """Threads that may not run at once wait for each other many times in a pass, and each time for very long."""
    cores = torch.get_num_threads()
    torch.set_num_threads(settings.threads or min(cores, cpu_limit() or cores))


def cpu_limit(cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """The cores' worth of time that a container may use, rounded up; None without a limit of that kind (cgroup v2)."""
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
        return -(-int(quota) // int(period))
    except (OSError, ValueError):  # no such file, or "max"
        return None


def free_memory(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that the machine can give, and the container's limit allows (cgroup v2)."""
    free = psutil.virtual_memory().available
    try:
        limit, used = (int((cgroup / name).read_text()) for name in ("memory.max", "memory.current"))
    except (OSError, ValueError):  # no such file, or "max"
        return free
    files = re.search(r"^inactive_file (\d+)$", (cgroup / "memory.stat").read_text(), re.MULTILINE)
    return max(0, min(free, limit - used + (int(files[1]) if files else 0)))  # cached files give way


def _device(settings: Settings) -> torch.device:
    available = torch.cuda.is_available()
    if settings.device == "cuda" and not available:
        raise SettingsError("--device: cuda was asked for, but torch finds no GPU")
    if settings.device == "auto":
        return torch.device("cuda" if available and settings.kernels != "cpu" else "cpu")
    return torch.device(settings.device)


def _dtype(settings: Settings, device: torch.device) -> torch.dtype:
    """float32 on a CPU: exact and, for lack of native half types, also quick."""
    if settings.dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    chosen: torch.dtype = getattr(torch, settings.dtype)
    return chosen


def _loaded(settings: Settings, path: Path, kernels: Kernels, dtype: torch.dtype, device: torch.device) -> Transformer:
    size = settings.tensor_parallel
    if size == 1:
        return load_model(path, kernels, dtype, device)
    return load_parallel(
        Job(
            path,
            size,
            settings.kernels,
            device.type,
            dtype,
            settings.quantization,
            settings.deterministic,
            settings.activations,
        )
    )


def _recorded(settings: Settings, model: Transformer) -> Transformer:
    if not settings.cuda_graphs:
        return model
    if settings.tensor_parallel > 1:
        raise SettingsError("--cuda-graphs: passes that several processes share (--tensor-parallel) are not recorded")
    if model.device.type != "cuda" or not model.kernels.graphs:
        raise SettingsError(
            f"--cuda-graphs: the {model.kernels.name} kernels on {model.device} cannot be recorded; see verdraft doctor"
        )
    return with_recordings(model, CudaRecorder())


def _block_size(settings: Settings, kernels: Kernels) -> int:
    size = settings.block_size or kernels.page_size
    if kernels.page_sizes and size not in kernels.page_sizes:
        sizes = ", ".join(map(str, kernels.page_sizes))
        raise SettingsError(f"--block-size: the {kernels.name} kernels need one of {sizes}, got {size}")
    return size


def _exits(settings: Settings, model: Transformer, path: Path) -> Exits:
    if settings.exits == "none":
        return Exits()
    if settings.exits == "auto":
        return shipped_exits(model, path)
    try:
        if layers := re.fullmatch(r"(\d+),(\d+)", settings.exits):
            return own_exits(model, (int(layers[1]), int(layers[2])))
        return load_exits(Path(settings.exits), model, path)
    except ModelError as error:
        raise SettingsError(f"--exits: {error}") from error


def _eagle(settings: Settings, model: Transformer, path: Path) -> EagleHead | None:
    if settings.eagle == "none":
        return None
    if settings.eagle == "auto":
        return shipped_eagle(model, path)
    try:
        return load_eagle(Path(settings.eagle), model, path)
    except ModelError as error:
        raise SettingsError(f"--eagle: {error}") from error


def _eagle_draft(text: str) -> DraftShape:
    depth, *tree = map(int, text.split(","))
    return DraftShape(depth, *tree) if tree else DraftShape(depth, topk=1, tokens=depth)


def _check_mode(settings: Settings, exits: Exits, eagle: EagleHead | None) -> None:
    if settings.speculation in EXIT_MODES and not exits:
        raise SettingsError(
            f"--speculation: {settings.speculation} needs early exits, this model has none; see --exits"
        )
    if settings.speculation == "eagle" and eagle is None:
        raise SettingsError("--speculation: eagle needs an EAGLE3 head, this model has none; see --eagle")


def _engine_config(settings: Settings, model: Transformer, eagle: EagleHead | None) -> EngineConfig:
    longest = model.config.max_model_len
    max_model_len = settings.max_model_len or longest
    if max_model_len > longest:
        raise SettingsError(f"--max-model-len: the model was trained for at most {longest} tokens, got {max_model_len}")
    return EngineConfig(
        max_model_len=max_model_len,
        num_blocks=_num_blocks(settings, model, max_model_len, eagle),
        block_size=_block_size(settings, model.kernels),
        max_num_seqs=settings.max_num_seqs,
        max_queue=settings.max_queue,
        max_batch_tokens=settings.max_batch_tokens or max(256, 2 * settings.max_num_seqs),
        speculation="hybrid" if settings.speculation == "auto" else settings.speculation,
        eagle=_eagle_draft(settings.eagle_draft),
        router=settings.router,
        eos_token_ids=model.config.eos_token_ids,
    )


def _num_blocks(settings: Settings, model: Transformer, max_model_len: int, eagle: EagleHead | None) -> int:
    """As asked for, else as memory allows, but no more than all sequences at full length can use."""
    on_gpu = model.device.type == "cuda"
    free = torch.cuda.mem_get_info(model.device)[0] if on_gpu else free_memory()
    block_size = _block_size(settings, model.kernels)
    block_bytes = block_size * (model.kv_bytes_per_token + (eagle.kv_bytes_per_token if eagle else 0))
    if settings.kv_blocks:
        return _affordable(settings.kv_blocks, free // block_bytes)
    fraction = settings.memory_fraction or (GPU_FRACTION if on_gpu else CPU_FRACTION)
    affordable = int(free * fraction) // block_bytes
    useful = settings.max_num_seqs * -(-max_model_len // block_size)
    if affordable < 2:
        raise SettingsError(f"the KV pool needs more memory than {fraction:.0%} of what is free; see --memory-fraction")
    return min(affordable, useful)


def _affordable(asked: int, most: int) -> int:
    if asked > most:
        raise SettingsError(f"--kv-blocks: the free memory holds at most {most} blocks, got {asked}")
    return asked
