"""`vllm.LLM` behind the routes of `vllm serve` that the test uses, in the engine's environment.

usage: python offline_engine.py MODEL PORT
"""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any


def main() -> None:
    from vllm import LLM, SamplingParams

    model, port = sys.argv[1], int(sys.argv[2])
    llm = LLM(
        model,
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        tensor_parallel_size=2,
        max_model_len=128,
        max_num_seqs=8,
        kv_cache_memory_bytes=16 << 20,
        enable_prefix_caching=False,
        weight_transfer_config={"backend": "m2n_plan"},
    )

    def generate(body: dict[str, Any]) -> dict[str, Any]:
        params = SamplingParams(**body["sampling_params"])
        prompts = [{"prompt_token_ids": body["token_ids"]}]
        (output,) = llm.generate(prompts, params, use_tqdm=False)
        return {"choices": [{"token_ids": list(output.outputs[0].token_ids)}]}

    routes = {
        "/inference/v1/generate": generate,
        "/init_weight_transfer_engine": llm.init_weight_transfer_engine,
        "/start_weight_update": lambda _: llm.start_weight_update(),
        "/update_weights": llm.update_weights,
        "/finish_weight_update": lambda body: llm.finish_weight_update(body.get("weight_version")),
    }

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(200, {})

        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            try:
                self._answer(200, routes[self.path](json.loads(data or b"{}") or {}) or {})
            except Exception as error:
                self._answer(500, {"error": str(error)})

        def _answer(self, status: int, body: dict[str, Any]) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    HTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    main()
