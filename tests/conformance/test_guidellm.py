"""`guidellm`: a short load of four streams over each endpoint, with prompts that it generates by the local
tokenizer."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REQUESTS = 40
OUTPUT_TOKENS = 24


@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_a_load_is_answered_without_errors(
    endpoint: str, model: str, api_key: str, tmp_path: Path, record_property: Any
) -> None:
    checkpoint, report = os.environ["KAON_CHECKPOINT"], tmp_path / "report.json"
    backend = f"kind=openai_http,target={os.environ['KAON_URL']},model={model},request_format={endpoint},http2=false"
    command = [str(Path(sys.executable).with_name("guidellm")), "run"]
    command += ["--backend", f"{backend},api_key={api_key}"]
    command += ["--tokenizer", f"kind=hf_auto,model={checkpoint}"]
    command += ["--data", f"kind=synthetic_text,prompt_tokens=48,output_tokens={OUTPUT_TOKENS}"]
    command += ["--profile", "kind=concurrent,streams=4", "--constraint", f"kind=max_requests,count={REQUESTS}"]
    command += ["--output", f"kind=json,path={report}", "--disable-console-interactive"]
    environment = {**os.environ, "HF_HOME": str(tmp_path / "hf")}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    errors = {request["info"]["error"] for request in benchmark["requests"]["errored"]}
    assert (totals["successful"], totals["errored"], totals["incomplete"]) == (REQUESTS, 0, 0), errors
    lengths = {request["output_metrics"]["text_tokens"] for request in benchmark["requests"]["successful"]}
    assert lengths == {OUTPUT_TOKENS}
    record_property("note", f"`{endpoint}`: {REQUESTS} requests of {OUTPUT_TOKENS} tokens, no errors.")
