# `make serve` answers on http://127.0.0.1:8000/v1 with the demo model; `make test` is what CI runs.
PYTHON ?= python3
HOST ?= 127.0.0.1
PORT ?= 8000
ARGS ?=
# A folder of JSONL prompts (bench, soak) and the folder of the black-box HTTP suite (conformance).
DATA ?= $(VERDRAFT_DATA)
CONFORMANCE ?= shared/conformance

BIN := .venv/bin
READY := .venv/.ready

.PHONY: serve test check wheel bench overhead conformance law properties portable sanitize soak chaos fuzz clean

serve: $(READY)
	$(BIN)/verdraft serve --host $(HOST) --port $(PORT) $(ARGS)

test: check
	$(BIN)/pytest $(ARGS)

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tests/sizes.py
	$(BIN)/pytest -q tests/test_layers.py

wheel: $(READY)
	$(BIN)/python -m build

bench: $(READY)
	$(BIN)/python -m verdraft.bench.load --data "$(DATA)" --baseline $(ARGS)

# What the server costs around the engine: CPU time per streamed token, and how late a first chunk leaves.
overhead: $(READY)
	$(BIN)/python -m verdraft.bench.overhead $(ARGS)

soak: $(READY)
	$(BIN)/python -m verdraft.bench.soak --data "$(DATA)" $(ARGS)

# Half an hour of hostile clients, faults, freezes and restarts; every token of the good clients is checked.
chaos: $(READY)
	$(BIN)/python -m verdraft.bench.chaos $(ARGS)

# A quarter of an hour of odd requests, drawn from the server's own OpenAPI description.
fuzz: $(READY)
	$(BIN)/python -m verdraft.bench.fuzz $(ARGS)

# The law's whole matrix on the demo model: tens of thousands of tokens, many minutes.
law: $(READY)
	$(BIN)/pytest -m long tests/test_law.py $(ARGS)

# The C++ as compiled for other processors, in QEMU's emulation of them; needs qemu-user-static and, for ARM,
# g++-aarch64-linux-gnu.
portable: $(READY)
	$(BIN)/pytest -m long --timeout 1800 tests/kernels/test_processors.py $(ARGS)

# The property-based tests of whole requests, with fifty times as many examples: many minutes.
properties: $(READY)
	$(BIN)/pytest --hypothesis-profile long --timeout 7200 tests/scheduler/test_properties.py \
	tests/server/http/test_properties.py tests/server/test_assembler.py $(ARGS)

# The C++ under AddressSanitizer and UBSan, through the same tests; Python itself leaks by design.
sanitize: $(READY)
	XDG_CACHE_HOME="$(CURDIR)/build/sanitize" CXX="$(CURDIR)/tests/kernels/sanitized-g++" \
	LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" ASAN_OPTIONS=detect_leaks=0 \
	$(BIN)/pytest -p no:faulthandler --timeout 1800 tests/kernels/test_attention.py tests/kernels/test_tree.py \
	tests/kernels/test_ops.py tests/kernels/test_linear.py tests/kernels/test_quantized.py tests/kernels/test_rounded.py \
	tests/kernels/test_sampling.py tests/model/test_fused.py tests/spec/test_suffix_index.py tests/spec/test_suffix.py \
	tests/spec/test_predictor.py $(ARGS)

conformance: $(READY)
	VERDRAFT_CMD="$(CURDIR)/$(BIN)/verdraft serve" $(BIN)/pytest -p no:asyncio -p no:cacheprovider -c "$(CONFORMANCE)/pytest.ini" "$(CONFORMANCE)" $(ARGS)

clean:
	rm -rf .venv build dist src/verdraft.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch comes first and alone: the pinned version is then found by one rule, before anything else can pull another.
# For a machine without a GPU, point pip's PIP_EXTRA_INDEX_URL at PyTorch's own index of CPU wheels (much smaller).
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet "$$(grep '^torch==' constraints.txt)"
	$(BIN)/pip install --quiet -c constraints.txt -e ".[dev]"
	touch $@
