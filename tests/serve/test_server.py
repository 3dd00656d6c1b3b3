"""The server as a process, around a scripted model: start, refusal to start, end."""

import contextlib
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from k3jax.errors import CheckpointError, ConfigError
from k3jax.serve.server import ModelSource, ServerConfig, make_service
from k3jax.serve.service import GenerationDefaults
from tests.serve.scripted import ScriptedModel

ROOT = Path(__file__).parents[2]
TOKENIZER = ROOT / "k3jax/assets/tiny-tokenizer"

PROGRAM = """
import sys, time
from k3jax.errors import CheckpointError
from k3jax.flags import parse_flags
from k3jax.serve.server import ModelSource, ServerConfig, run
from tests.serve.scripted import ScriptedModel

def load(config, path):
    if "damaged" in path:
        raise CheckpointError("tensor is gone,\\nall of it", file=path, tensor="embed")
    if "slow" in path:
        print("loading", file=sys.stderr, flush=True)
        time.sleep(60)
    if "fault" in path:
        raise ZeroDivisionError("a fault in the program")
    return ScriptedModel()

source = ModelSource(lambda: {tokenizer!r}, lambda path: {untrained}, load)
sys.exit(run(parse_flags(ServerConfig, positional="model"), source))
"""


@contextlib.contextmanager
def program(*argv: str, untrained: bool = True):
    text = PROGRAM.replace("{tokenizer!r}", repr(str(TOKENIZER)))
    process = subprocess.Popen(
        [sys.executable, "-c", text.replace("{untrained}", str(untrained)), *argv],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def read_url(process) -> str:
    lines = []
    for line in process.stderr:
        lines.append(line)
        if match := re.search(r"listening on (http://\S+)", line):
            return match[1]
    raise AssertionError("".join(lines))


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_serves_until_a_signal(signum):
    with program("--port", "0") as process:
        url = read_url(process)
        (model,) = httpx.get(f"{url}/v1/models").json()["data"]
        assert model["id"] == "k3jax-tiny"
        assert model["description"].startswith("UNTRAINED")
        process.send_signal(signum)
        assert process.wait(20) == 0
        rest = process.stderr.read()
        assert "Traceback" not in rest and "has ended" in rest


def test_names_of_a_checkpoint():
    argv = ("some/folder", "--served-model-name", "k3", "kimi", "--port", "0")
    with program(*argv, untrained=False) as process:
        models = httpx.get(f"{read_url(process)}/v1/models").json()["data"]
        assert [model["id"] for model in models] == ["k3", "kimi"]
        assert models[0]["description"] == "The checkpoint folder."


@pytest.mark.parametrize(
    "argv, message",
    [
        (["damaged"], "error: tensor is gone, all of it (file damaged, tensor embed)"),
        (["--host", "256.0.0.1"], "error: cannot listen on 256.0.0.1"),
    ],
    ids=["damaged_checkpoint", "no_such_address"],
)
def test_refusal_is_one_line(argv, message):
    with program(*argv, "--port", "0") as process:
        assert process.wait(20) == 1
        error = process.stderr.read()
        assert error.startswith(message) and error.count("\n") == 1


def test_a_taken_port_is_refused_before_loading():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with program("slow", "--port", str(taken.getsockname()[1])) as process:
            assert process.wait(20) == 1
            assert process.stderr.read().startswith("error: cannot listen on 127.0.0.1 port")


def test_a_fault_of_the_program_is_not_hidden():
    with program("fault", "--port", "0") as process:
        assert process.wait(20) == 1
        assert "ZeroDivisionError" in process.stderr.read()


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_loading_ends_at_once(signum):
    with program("slow", "--port", "0") as process:
        assert process.stderr.readline() == "loading\n"
        process.send_signal(signum)
        assert process.wait(10) == 128 + signum
        assert process.stderr.read() == ""


def source(model=None) -> ModelSource:
    return ModelSource(lambda: TOKENIZER, lambda path: False, lambda *_: model or ScriptedModel())


def test_tokenizer_and_model_must_fit():
    with pytest.raises(CheckpointError, match="1024 ids, the model only 160"):
        make_service(ServerConfig(), source(ScriptedModel(vocab_size=160)))


def test_a_folder_without_tokenizer_serves_token_ids(tmp_path):
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 5, "top_p": 0.95}')
    service = make_service(ServerConfig(str(tmp_path)), source())
    assert service.tokenizer is None
    assert service.defaults == GenerationDefaults({"top_p": 0.95}, frozenset({5}))
    service.worker.close()


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"temperature": -1}', '{"eos_token_id": "x"}', '{"top_p": "all"}']
)
def test_damaged_generation_config(tmp_path, content):
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        GenerationDefaults.read(tmp_path)


@pytest.mark.parametrize("fields", [{"port": -1}, {"max_model_len": 1}, {"max_waiting": -1}])
def test_flags_out_of_range(fields):
    with pytest.raises(ConfigError, match=f"--{next(iter(fields)).replace('_', '-')}"):
        ServerConfig(**fields)
