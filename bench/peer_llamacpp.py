"""llama.cpp's own HTTP server, in this process. Run with the Python of its environment: knows nothing of verdraft."""

import argparse
import signal

import xllamacpp  # type: ignore[import-not-found]  # lives in an environment of its own


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a .gguf file")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--slots", type=int, required=True, help="streams at a time")
    parser.add_argument("--context", type=int, required=True, help="tokens of each stream")
    parser.add_argument("--ngram", type=int, default=0, help="tokens to look up for a draft; 0: no drafts")
    parser.add_argument("--draft", type=int, default=48, help="tokens of a draft")
    server = xllamacpp.Server(parameters(parser.parse_args()))
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    del server  # stops it


def parameters(args: argparse.Namespace) -> xllamacpp.CommonParams:
    """The server's, with float32 keys and values, and no cache of earlier prompts."""
    params = xllamacpp.CommonParams()
    params.model.path, params.port = args.model, args.port
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = args.threads
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.n_parallel, params.n_ctx = args.slots, args.slots * args.context
    params.cache_prompt, params.cache_ram_mib = False, 0
    if args.ngram:
        params.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
        params.speculative.ngram_simple.size_n = args.ngram
        params.speculative.ngram_simple.size_m = args.draft
    return params


if __name__ == "__main__":
    main()
