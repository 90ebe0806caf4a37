"""`schemathesis`: requests made from `/openapi.json`, right and wrong ones, in all its phases with a fixed seed."""

import json
import os
import re
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

SEED = "20251"
MAX_EXAMPLES = os.environ.get("CONFORMANCE_EXAMPLES", "60")
"""An operation and phase."""

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "unsupported_method",
    "allow_header_conformance",
    "use_after_free",
    "ensure_resource_availability",
    "ignored_auth",
    "negative_data_rejection",
)


def test_the_description_is_reachable_and_names_every_route() -> None:
    with urllib.request.urlopen(f"{os.environ['KAON_URL']}/openapi.json") as answer:
        paths = json.load(answer)["paths"]
    assert {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/responses/{response_id}",
        "/v1/responses/compact",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/embeddings",
        "/v1/rerank",
        "/v1/files",
        "/v1/batches",
        "/v1/models",
        "/tokenize",
        "/detokenize",
        "/version",
    } <= paths.keys()


def test_every_phase_passes(api_key: str, tmp_path: Path, record_property: Any) -> None:
    report = tmp_path / "report.json"
    command = [str(Path(sys.executable).with_name("st")), "run", f"{os.environ['KAON_URL']}/openapi.json"]
    command += ["--phases", "examples,coverage,fuzzing,stateful", "--checks", ",".join(CHECKS)]
    command += ["--seed", SEED, "--generation-database", "none"]
    command += ["--max-examples", MAX_EXAMPLES, "--continue-on-failure"]
    # A sleeping server answers 503 until it is woken; tests/e2e/test_http_sleep.py has this endpoint.
    command += ["--exclude-path", "/sleep"]
    command += ["--suppress-health-check", "all", "--request-timeout", "180", "--no-color", "--no-shrink"]
    if paths := os.environ.get("CONFORMANCE_PATHS"):
        command += ["--include-path-regex", paths]
    command += ["--header", f"Authorization: Bearer {api_key}", "--report", "json", "--report-json-path", str(report)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-30_000:] + done.stderr[-4_000:]
    if found := re.search(r"^.*\bgenerated\b.*$", done.stdout, re.MULTILINE):
        record_property("note", f"Seed {SEED}, requests: {found[0].strip()}.")
