"""Judge a cut model by lm-evaluation-harness, with its codecs on or off.

    pip install lm_eval
    python examples/lm_eval_model.py run --model thinwire --model_args run=runs/lab,codecs=on --tasks arc_easy,wikitext

`run` is the folder of a run, a checkpoint or an export; `codecs` is on or off. All stages run in this process. Tokens,
windows, chat templates and stop words are those of the harness's own class for transformers, `hf`; only what computes
is another, so without codecs the numbers are those of `--model hf` with the export.
"""

from __future__ import annotations

import atexit
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from torch import Tensor
from transformers import AutoConfig

from thinwire.compress import PassKind
from thinwire.launch.generate import opened
from thinwire.models.data.parts import BYTES
from thinwire.models.data.tokenizer import load_tokenizer
from thinwire.pipeline.errors import OptionsError
from thinwire.pipeline.generation import Sampling

_OPEN = ExitStack()
"""Closes the model that is open: a process has one at a time."""
atexit.register(_OPEN.close)


@register_model("thinwire")
class CutModel(HFLM):  # type: ignore[misc]
    """The model of a run, cut into its stages.

    Args:
        run: the folder of a run, a checkpoint or an export.
        codecs: on or off.
        others: what `hf` takes besides the model, such as max_length; the harness gives batch_size and device, and
            samples go one by one, on the device of the recipe.
    """

    def __init__(self, run: str, codecs: str = "on", **others: Any) -> None:
        # YAML, and so the harness, reads on and off as true and false
        modes: dict[str, PassKind] = {"on": "eval-on", "off": "eval-off", "True": "eval-on", "False": "eval-off"}
        if str(codecs) not in modes:
            raise OptionsError(f"codecs must be on or off, got {codecs}")
        self._run, self._codecs = str(run), modes[str(codecs)]
        _OPEN.close()
        prepared, self._generator = _OPEN.enter_context(opened(self._run, [], "a", 1))
        blueprint, tokenizer = prepared.blueprint, prepared.recipe.data.tokenizer
        self._ends = prepared.prompts.ends if prepared.prompts is not None else frozenset()
        if blueprint.save_config is None or tokenizer == BYTES:
            raise OptionsError(f"the harness needs a model and a tokenizer of transformers, and {run} has none")
        with tempfile.TemporaryDirectory() as folder:
            blueprint.save_config(Path(folder))
            config = AutoConfig.from_pretrained(folder)
        given = {name: value for name, value in others.items() if name not in ("device", "batch_size")}
        shell: Any = SimpleNamespace(device=torch.device("cpu"), config=config)
        super().__init__(shell, tokenizer=load_tokenizer(tokenizer), batch_size=1, **given)

    def _model_call(self, inps: Tensor, *_: Any, **__: Any) -> Tensor:
        """The logits [B, T, V] of tokens [B, T]."""
        found = [self._generator.logits(row, self._codecs) for row in inps]
        return torch.stack([row.cpu() for row in found if row is not None])  # all stages are here

    def _model_generate(self, context: Tensor, max_length: int, stop: Sequence[str], **options: Any) -> Tensor:
        """The tokens [1, T] of one text, and those that follow, up to a stop word."""
        sampling = Sampling(temperature=options.get("temperature") or 0.0, top_p=options.get("top_p") or 1.0)
        text, said = context[0].tolist(), list[int]()
        most = max_length - len(text)
        for token in self._generator.tokens(context[0], most, self._ends, self._codecs, sampling):
            said.append(token)
            if any(word in self.tok_decode(said, skip_special_tokens=False) for word in stop):
                break
        return torch.tensor([text + said])

    def get_model_info(self) -> dict[str, Any]:
        """What the harness writes beside the scores."""
        return {"run": self._run, "codecs": self._codecs}


if __name__ == "__main__":
    cli_evaluate()
