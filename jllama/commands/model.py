"""The model that a command works with: which one it is, and in what form it is loaded."""

import dataclasses  # no postponed annotations here: jsonargparse resolves those of one base class only
from typing import TYPE_CHECKING, Literal

import jllama
from jllama.commands.terminal import say
from jllama.config import MeshConfig
from jllama.errors import check_fields, no_tokenizer
from jllama.generation.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jax.sharding import Mesh


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """Which checkpoint to load, and how.

    Args:
        checkpoint: the folder of a run, or a model in any format: a Hugging Face or Meta folder, a GGUF or llama2.c
            file, a Hugging Face hub id.
        step: which checkpoint of a run; 0 takes the one with the lowest validation loss.
        dtype: of the parameters; without it float32 on a CPU, and elsewhere the files' own.
        quantize: int8, a quarter of the memory; results change a little. On a GPU or TPU it saves no time.
        rope_factor: the RoPE scaling factor that Meta's params.json lacks.
    """

    checkpoint: str
    step: int = 0
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    quantize: Literal["int8"] | None = None
    rope_factor: float | None = None

    def __post_init__(self) -> None:
        check_fields(self, "", "step", lambda value: value >= 0, "0 or more")

    def load_with(self, mesh: "Mesh | None", adapter: str | None) -> "jllama.LanguageModel":
        """The model, in the layout for decoding, over a mesh and with an adapter if there are any."""
        import jax

        if self.quantize and jax.default_backend() != "cpu":
            say("quantize int8 saves memory here and no time: only on a CPU is it faster")
        options = {
            "rope_factor": self.rope_factor,
            "step": self.step or None,
            "quantize": self.quantize,
        }
        return jllama.load(self.checkpoint, self.dtype, mesh, adapter=adapter, **options)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelOptions(CheckpointOptions):
    """Which model to load, and how.

    Args:
        mesh: how the model is split over all devices; without it the first one holds it whole.
        adapter: what was trained beside these weights: a run (whose step is meant then), PEFT's folder, a GGUF LoRA.
    """

    mesh: MeshConfig = dataclasses.field(default_factory=lambda: MeshConfig(data=1))
    adapter: str | None = None

    def __post_init__(self) -> None:
        check_fields(
            self.mesh,
            "mesh.",
            "rules",
            lambda rules: not rules,
            "left out, as they are for training",
        )
        super().__post_init__()

    def load_model(self, needs_tokenizer: bool = True) -> "jllama.LanguageModel":
        """The model, in the layout for decoding."""
        from jllama import programs

        if (
            mesh := None if self.mesh == MeshConfig(data=1) else jllama.make_mesh(self.mesh)
        ) is None:
            programs.keep(self.checkpoint)
        model = self.load_with(mesh, self.adapter)
        if needs_tokenizer and model.tokenizer is None:
            raise no_tokenizer(self.checkpoint)
        return model

    def say_loaded(self, model: "jllama.LanguageModel") -> None:
        """Which model it is, to stderr."""
        said = self.checkpoint + (f" with {self.adapter}" if self.adapter else "")
        say(said if model.step is None else f"{said}, step {model.step}")


def sampling_params(options: SamplingParams) -> SamplingParams:
    """Those of a command's options that are fields of ``SamplingParams``."""
    return SamplingParams(**{name: getattr(options, name) for name in vars(SamplingParams())})
