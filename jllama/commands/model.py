"""The options that choose a model, and how commands load it."""

# No postponed annotations here: jsonargparse resolves those of only one base class.
import dataclasses
from typing import TYPE_CHECKING, Literal

import jllama
from jllama.commands.terminal import say
from jllama.core import check_fields
from jllama.generation.sampling_params import SamplingParams
from jllama.parallel.config import MeshConfig
from jllama.system.errors import no_tokenizer

if TYPE_CHECKING:
    from jax.sharding import Mesh


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """Options that choose a checkpoint and its data types.

    Args:
        checkpoint: the folder of a run, or a model in any format: a Hugging Face or Meta folder,
            a GGUF or llama2.c file, or the id of a model on the Hugging Face hub.
        step: the step of a run's checkpoint; 0 takes the one with the lowest validation loss.
        dtype: the data type of the parameters; the default is float32 on a CPU, elsewhere the
            type in the files.
        quantize: int8 stores weights in a quarter of float32's memory and changes results a
            little. It saves time on a CPU, and no time on a GPU or TPU.
        rope_factor: the RoPE scaling factor that Meta's params.json leaves out.
    """

    checkpoint: str
    step: int = 0
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    quantize: Literal["int8"] | None = None
    rope_factor: float | None = None

    def __post_init__(self) -> None:
        check_fields(self, "", "step", lambda value: value >= 0, "0 or more")

    def load_with(self, mesh: "Mesh | None", adapter: str | None) -> "jllama.LanguageModel":
        """Load the model in the layout for decoding, over a mesh and with an adapter if given."""
        import jax

        if self.quantize and jax.default_backend() != "cpu":
            say("quantize int8 saves memory here and no time; only on a CPU is it faster")
        return jllama.load(
            self.checkpoint,
            self.dtype,
            mesh,
            adapter=adapter,
            rope_factor=self.rope_factor,
            step=self.step or None,
            quantize=self.quantize,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelOptions(CheckpointOptions):
    """Options that choose a checkpoint, an adapter and a mesh.

    Args:
        mesh: the axes over which the model is split on all devices; by default the first device
            has the whole model.
        adapter: an adapter for these weights: a run that trained one (step then is that run's),
            a folder of PEFT, or a GGUF LoRA.
    """

    mesh: MeshConfig = dataclasses.field(default_factory=lambda: MeshConfig(data=1))
    adapter: str | None = None

    def __post_init__(self) -> None:
        expected = "left out, because rules are for training"
        check_fields(self.mesh, "mesh.", "rules", lambda rules: not rules, expected)
        super().__post_init__()

    def load_model(self, needs_tokenizer: bool = True) -> "jllama.LanguageModel":
        """Load the model in the layout for decoding.

        Raises:
            JllamaError: if ``needs_tokenizer`` and the model has none.
        """
        mesh = None
        if self.mesh == MeshConfig(data=1):
            store_programs(self.checkpoint)
        else:
            mesh = jllama.make_mesh(self.mesh)
        model = self.load_with(mesh, self.adapter)
        if needs_tokenizer and model.tokenizer is None:
            raise no_tokenizer(self.checkpoint)
        return model

    def say_loaded(self, model: "jllama.LanguageModel") -> None:
        """Print to stderr which model was loaded."""
        name = self.checkpoint
        if self.adapter:
            name += f" with {self.adapter}"
        if model.step is not None:
            name += f", step {model.step}"
        say(name)


def store_programs(*task: str) -> None:
    """Let the engine store its compiled programs for later processes with this task."""
    from jllama.generation import steps
    from jllama.system import programs

    programs.enable_store(*task)
    steps.call_program = programs.call


def sampling_params(options: SamplingParams) -> SamplingParams:
    """Copy the fields of ``SamplingParams`` from a command's options."""
    return SamplingParams(**{name: getattr(options, name) for name in vars(SamplingParams())})
