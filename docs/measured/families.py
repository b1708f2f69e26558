"""Every language model that transformers knows, in its default configuration: whether it can be cut, or why not.

    python docs/measured/families.py

Nothing is downloaded: a tiny copy of each is cut after every block and compared with the uncut one, as before a run.
"""

import warnings
from collections import Counter

import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from thinwire.models.errors import ModelError
from thinwire.models.model import find_model
from thinwire.models.options import ModelOptions
from thinwire.models.source import Use


def main() -> None:
    """Print a line for each, and how many there are."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    counted: Counter[str] = Counter()
    for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        options = ModelOptions(name=name)
        try:
            compare = find_model(options).blueprint(Use(task="causal-lm")).compare
            assert compare is not None, "only layers of one's own are not compared"
            verdict, said = "cut", compare()
        except ModelError as error:
            verdict, said = "refused", str(error)
        counted[verdict] += 1
        print(f"{name}: {verdict}: {said}", flush=True)
    print(dict(counted))


if __name__ == "__main__":
    main()
