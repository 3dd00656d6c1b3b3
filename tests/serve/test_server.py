"""The server as a process, around a scripted engine: start, refusal to start, end."""

import contextlib
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from k3jax.engine.inputs import GenerationDefaults
from k3jax.errors import CheckpointError, ConfigError
from k3jax.flags import parse_flags
from k3jax.serve.config import REFUSED_FLAGS, ServerConfig
from k3jax.serve.server import ModelSource, make_service
from tests.serve.scripted import ScriptedEngine

ROOT = Path(__file__).parents[2]
TOKENIZER = ROOT / "k3jax/assets/tiny-tokenizer"

PROGRAM = """
import sys, time
from k3jax.errors import CheckpointError
from k3jax.flags import parse_flags
from k3jax.serve.config import REFUSED_FLAGS, ServerConfig
from k3jax.serve.server import ModelSource, run
from tests.serve.scripted import ScriptedEngine

def load(config, path):
    if "damaged" in path:
        raise CheckpointError("tensor is gone,\\nall of it", file=path, tensor="embed")
    if "slow" in path:
        print("loading", file=sys.stderr, flush=True)
        time.sleep(60)
    if "fault" in path:
        raise ZeroDivisionError("a fault in the program")
    return ScriptedEngine()

source = ModelSource(lambda: {tokenizer!r}, lambda path: {untrained}, load)
sys.exit(run(parse_flags(ServerConfig, positional="model", refused=REFUSED_FLAGS), source))
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


def source(engine=None) -> ModelSource:
    return ModelSource(lambda: TOKENIZER, lambda path: False, lambda *_: engine or ScriptedEngine())


def test_tokenizer_and_model_must_fit():
    with pytest.raises(CheckpointError, match="1024 ids, the model only 160"):
        make_service(ServerConfig(), source(ScriptedEngine(vocab_size=160)))


def test_a_folder_without_tokenizer_serves_token_ids(tmp_path):
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 5, "top_p": 0.95}')
    service = make_service(ServerConfig(str(tmp_path)), source())
    assert service.inputs.tokenizer is None
    assert service.inputs.defaults == GenerationDefaults({"top_p": 0.95}, frozenset({5}))
    service.engine.close()


def test_generation_config(tmp_path):
    for name, top_p in (("checkpoint", 0.9), ("other", 0.8), ("none", None)):
        folder = tmp_path / name
        folder.mkdir()
        if top_p is not None:
            text = f'{{"eos_token_id": 5, "top_p": {top_p}}}'
            (folder / "generation_config.json").write_text(text)

    def defaults(value: str) -> GenerationDefaults:
        config = ServerConfig(str(tmp_path / "checkpoint"), generation_config=value)
        service = make_service(config, source())
        service.engine.close()
        return service.inputs.defaults

    assert defaults("auto") == GenerationDefaults({"top_p": 0.9}, frozenset({5}))
    assert defaults("vllm") == GenerationDefaults({}, frozenset({5}))
    assert defaults(str(tmp_path / "other")).sampling == {"top_p": 0.8}
    with pytest.raises(ConfigError, match="--generation-config"):
        defaults(str(tmp_path / "none"))


def test_tokenizer_of_another_folder(tmp_path):
    service = make_service(ServerConfig(str(tmp_path), tokenizer=str(TOKENIZER)), source())
    assert service.inputs.tokenizer is not None
    service.engine.close()
    with pytest.raises(CheckpointError):
        make_service(ServerConfig(tokenizer=str(tmp_path)), source())


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"temperature": -1}', '{"eos_token_id": "x"}', '{"top_p": "all"}']
)
def test_damaged_generation_config(tmp_path, content):
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        GenerationDefaults.read(tmp_path)


@pytest.mark.parametrize(
    "fields",
    [
        {"port": -1},
        {"max_model_len": 1},
        {"max_waiting": 0},
        {"tensor_parallel_size": 0},
        {"model": ""},
        {"tokenizer": ""},
        {"generation_config": ""},
        {"block_size": 0},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_flags_out_of_range(fields):
    with pytest.raises(ConfigError, match=f"--{next(iter(fields)).replace('_', '-')}"):
        ServerConfig(**fields)


def parse(*argv: str) -> ServerConfig:
    return parse_flags(ServerConfig, argv, positional="model", refused=REFUSED_FLAGS)


def test_flags_of_vllm():
    config = parse("k3", "-tp", "2", "--max-num-seqs", "16", "--no-enable-prefix-caching")
    assert (config.model, config.tensor_parallel_size, config.max_num_seqs) == ("k3", 2, 16)
    assert not config.enable_prefix_caching
    assert parse("--tensor-parallel-size", "2", "k3").tensor_parallel_size == 2
    assert parse("k3", "--trust-remote-code", "--disable-log-requests").model == "k3"


REFUSED = {
    "lora": (["--enable-lora"], "--enable-lora: LoRA is not supported yet"),
    "lora_modules": (["--lora-modules", "a=b", "c=d"], "--lora-modules: LoRA"),
    "template": (["k3", "--chat-template", "x"], "--chat-template: the prompts of K3"),
    "negated": (["--no-enable-chunked-prefill"], "--no-enable-chunked-prefill: it is always on"),
    "underscores": (["--speculative_config={}"], "--speculative_config: speculative decoding"),
    "short": (["-dp", "2"], "-dp: only --tensor-parallel-size"),
    "unknown": (["--max-num-seq", "3"], "unknown flag --max-num-seq, did you mean --max-num-seqs?"),
}


@pytest.mark.parametrize("argv, message", REFUSED.values(), ids=REFUSED.keys())
def test_flags_that_are_refused(capsys, argv, message):
    with pytest.raises(SystemExit) as ended:
        parse(*argv)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {message}") and error.count("\n") == 1


def test_no_flag_is_both_served_and_refused():
    fields = ServerConfig.__dataclass_fields__
    assert not {f"--{name.replace('_', '-')}" for name in fields} & REFUSED_FLAGS.keys()


def test_help_tells_every_flag_and_its_default(capsys):
    with pytest.raises(SystemExit):
        parse("--help")
    text = " ".join(capsys.readouterr().out.split())
    for told in (
        "pages of the MLA cache (default: what memory allows)",
        "an fp8 cache (default: 1 for all)",
        "what requests get that ask for logprobs (default: raw_logprobs)",
        "generation_config.json (default: auto)",
        "-tp INT, --tensor-parallel-size INT devices that share the model (default: 1)",
    ):
        assert told in text
