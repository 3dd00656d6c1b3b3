"""The server's flags, with vLLM's names. Imports no jax."""

from dataclasses import dataclass, field

from k3jax.engine.config import EngineConfig
from k3jax.errors import ConfigError
from k3jax.flags import flag


@dataclass(frozen=True)
class ServerConfig(EngineConfig):
    """Serves a model over HTTP with the endpoints of the OpenAI API."""

    model: str | None = None  # folder of the checkpoint; without one, a tiny untrained model
    tokenizer: str | None = None  # folder of the tokenizer (default: that of the checkpoint)
    generation_config: str = "auto"  # sampling parameters for fields that requests leave out: auto
    # takes those of the checkpoint's generation_config.json, vllm the same neutral ones for every
    # model (temperature 1, no top-p, top-k or penalty); or a folder with a generation_config.json
    host: str = "127.0.0.1"  # address to listen on
    port: int = 8000  # port to listen on; 0 takes a free one and logs it
    served_model_name: tuple[str, ...] = ()  # names that requests may use instead of the folder
    max_waiting: int = 64  # answers that may wait for memory; while so many do, requests are
    # refused by 429
    tensor_parallel_size: int = field(default=1, metadata={"short": "-tp"})  # devices that share
    # the model
    trust_remote_code: bool = False  # without effect: no code of a checkpoint is ever run
    disable_log_requests: bool = False  # without effect: requests are never logged

    def __post_init__(self):
        super().__post_init__()
        for name in ("model", "tokenizer", "generation_config"):
            if getattr(self, name) == "":
                raise ConfigError(f"{flag(name)} is empty: name a folder")
        if not 0 <= self.port <= 65_535:
            raise ConfigError(f"--port {self.port} is not in 0..65535")
        for name in ("max_waiting", "tensor_parallel_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{flag(name)} {getattr(self, name)} must be at least 1")


WITHOUT_EFFECT = {
    "trust_remote_code": "no code of a checkpoint is ever run",
    "disable_log_requests": "requests are never logged",
}

# Flags of vLLM that there are not, or not yet, and why.
REFUSED_FLAGS = {
    name: reason
    for names, reason in {
        "--enable-lora --lora-modules --max-loras --max-lora-rank --max-cpu-loras --lora-dtype "
        "--fully-sharded-loras": "LoRA is not supported yet",
        "--chat-template --chat-template-content-format --trust-request-chat-template": (
            "the prompts of K3 are written by a program, not by a template"
        ),
        "--reasoning-parser --tool-call-parser --tool-parser-plugin": (
            "K3's own format is always parsed: leave it out"
        ),
        "--enable-auto-tool-choice": "tools are not supported yet",
        "--structured-outputs-config --guided-decoding-backend": (
            "structured outputs are not supported yet"
        ),
        "--quantization -q": "weights are used in the format of the checkpoint",
        "--load-format": "the format of a checkpoint is seen in its folder",
        "--tokenizer-mode": "there is one tokenizer",
        "--revision --code-revision --tokenizer-revision --download-dir --hf-token": (
            "nothing is downloaded: name a folder"
        ),
        "--hf-overrides --override-generation-config": "edit the checkpoint's JSON file instead",
        "--pipeline-parallel-size -pp --data-parallel-size -dp --data-parallel-backend "
        "--enable-expert-parallel --decode-context-parallel-size -dcp "
        "--prefill-context-parallel-size -pcp --all2all-backend --enable-eplb "
        "--num-redundant-experts --eplb-config --eplb-window-size --eplb-step-interval": (
            "only --tensor-parallel-size divides a model so far"
        ),
        "--nnodes --node-rank --master-addr --master-port --distributed-executor-backend": (
            "the server runs on one machine so far"
        ),
        "--speculative-config": "speculative decoding is not supported yet",
        "--kv-transfer-config": "prefill and decode on different machines are not supported yet",
        "--limit-mm-per-prompt --mm-encoder-tp-mode --mm-processor-kwargs "
        "--mm-processor-cache-gb --allowed-media-domains --allowed-local-media-path "
        "--interleave-mm-strings": "images are not supported yet",
        "--language-model-only": "text is all that is served yet: leave it out",
        "--enable-chunked-prefill --enable-prompt-tokens-details": (
            "it is always on: leave it out"
        ),
        "--enable-return-routed-experts": "routing is not returned yet",
        "--enable-sleep-mode": "sleeping is not supported yet",
        "--otlp-traces-endpoint": "traces are not supported yet",
        "--enable-log-requests": "requests are never logged",
        "--disable-log-stats": "no statistics are logged: leave it out",
        "--api-key --ssl-keyfile --ssl-certfile --allowed-origins --root-path": (
            "that is not supported yet: leave it to a proxy in front of the server"
        ),
        "--num-gpu-blocks-override --kv-cache-memory-bytes": (
            "say it in pages and states: --kv-pages, --kda-slots"
        ),
        "--swap-space --cpu-offload-gb --kv-offloading-size": "offloading is not supported yet",
        "--compilation-config -O --attention-backend --max-cudagraph-capture-size": (
            "vLLM's compiler and kernels are not used: see --compile-profile"
        ),
        "--mamba-cache-dtype": "use --mamba-ssm-cache-dtype",
        "--mamba-block-size": "use --prefix-cache-retention-interval",
    }.items()
    for name in names.split()
}
