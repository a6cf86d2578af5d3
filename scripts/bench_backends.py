"""One engine as a process that answers on its standard output: the other half of ``bench_engine.py``.

Runs under any Python that has the engine installed (vLLM brings its own venv), so nothing but the standard library is
imported at the top. Every line on standard input is a job, every line on standard output a result, as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

Generate = Callable[[Sequence[Sequence[int]], int], Sequence[Sequence[int]]]
"""(prompts, new tokens) -> output tokens of each prompt: greedy, EOS ignored."""
MAX_BATCH = 8


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("backend", choices=BACKENDS)
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--max-model-len", type=int, required=True)
    parser.add_argument("--options", default="{}", help="JSON, backend specific")
    args = parser.parse_args()
    results = _own_standard_output()
    generate, version = BACKENDS[args.backend](args.model, args.threads, args.max_model_len, json.loads(args.options))
    _tell(results, {"version": version})
    for line in sys.stdin:
        job = json.loads(line)
        start = time.perf_counter()
        outputs = generate(job["prompts"], job["new_tokens"])
        _tell(results, {"seconds": time.perf_counter() - start, "outputs": [list(output) for output in outputs]})


def baton(model: Path, threads: int, max_model_len: int, options: dict[str, Any]) -> tuple[Generate, str]:
    from engine import Engine, SamplingParams

    engine = Engine(model, threads=threads, max_model_len=max_model_len, max_running=MAX_BATCH, prefix_cache=False, **options)

    def generate(prompts: Sequence[Sequence[int]], new_tokens: int) -> Sequence[Sequence[int]]:
        params = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
        return [completion.token_ids for completion in engine.generate(prompts, params)]

    return generate, f"{engine.core.kernels.name}, K={engine.core.config.speculation}"


def transformers(model: Path, threads: int, max_model_len: int, options: dict[str, Any]) -> tuple[Generate, str]:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
    from transformers import __version__ as version

    torch.set_num_threads(threads)
    config = AutoConfig.from_pretrained(model)
    config.time_step_min = 1e-30  # transformers floors dt in prefill but not in decode; nobody else floors it
    network = AutoModelForCausalLM.from_pretrained(model, config=config, dtype=torch.float32, **options).eval()

    @torch.inference_mode()
    def generate(prompts: Sequence[Sequence[int]], new_tokens: int) -> Sequence[Sequence[int]]:
        ids = torch.tensor(prompts)  # all of one length, so that nothing is padded
        settings = GenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=None, pad_token_id=0)
        output = network.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
        rows: list[list[int]] = output[:, ids.shape[1] :].tolist()
        return rows

    return generate, f"transformers {version}"


def vllm(model: Path, threads: int, max_model_len: int, options: dict[str, Any]) -> tuple[Generate, str]:
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{threads - 1}" if threads > 1 else "0")
    from vllm import LLM, SamplingParams, TokensPrompt  # type: ignore[import-not-found]
    from vllm import __version__ as version

    defaults = {"dtype": "float32", "skip_tokenizer_init": True, "enable_prefix_caching": False, "max_num_seqs": MAX_BATCH}
    engine = LLM(model=str(model), max_model_len=max_model_len, **{**defaults, **options})

    def generate(prompts: Sequence[Sequence[int]], new_tokens: int) -> Sequence[Sequence[int]]:
        params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        outputs = engine.generate([TokensPrompt(prompt_token_ids=list(p)) for p in prompts], params, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]

    return generate, f"vllm {version}"


BACKENDS: dict[str, Callable[[Path, int, int, dict[str, Any]], tuple[Generate, str]]] = {
    "baton": baton,
    "transformers": transformers,
    "vllm": vllm,
}


def _own_standard_output() -> IO[str]:
    """Keep the pipe for results; what libraries print, from C too, goes to standard error."""
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return results


def _tell(results: IO[str], record: dict[str, Any]) -> None:
    results.write(json.dumps(record) + "\n")
    results.flush()


if __name__ == "__main__":
    main()
