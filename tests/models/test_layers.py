from functools import partial

import pytest
import torch
from torch import Tensor, nn

from thinwire.models.errors import ModelError
from thinwire.models.layers import (
    Blueprint,
    Chain,
    Layer,
    LayerSpec,
    build_stage,
    parameters_on_meta,
    stage_output_examples,
)

IDENTICAL = {"rtol": 0, "atol": 0}


class Lookup(Layer):
    """Ids [B] to features [B, 4] and, passed on as they are, the ids: a boundary with an integer tensor on it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 4)
        self.parts = {"table": self.table}

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        return self.table(ids), ids


class Mix(Layer):
    """Two tensors in, two out; batch norm brings buffers, floating and integer."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.parts = {f"mix.{index}": self.block}

    def forward(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        return self.block(x), ids


class ShiftedNorm(nn.LayerNorm):
    """A buffer that the state does not hold: its constructor computes it."""

    def __init__(self) -> None:
        super().__init__(4)
        self.register_buffer("shift", torch.arange(4.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.shift


class Score(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.norm = ShiftedNorm()
        self.score = nn.Linear(4, 3)
        self.parts = {"norm": self.norm, "score": self.score}

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.score(self.norm(x)) + ids[:, None]


def initialize(full_name: str, module: nn.Module) -> None:
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()


def toy() -> Blueprint:
    layers = (LayerSpec("lookup", Lookup), *(LayerSpec(f"mix {i}", partial(Mix, i)) for i in range(2)))
    return Blueprint((*layers, LayerSpec("score", Score)), initialize)


def broken(build: type[Layer]) -> Blueprint:
    return Blueprint((LayerSpec("only", build),), initialize)


IDS = torch.tensor([5, 0, 3])
CUTS = {
    1: (range(0, 4),),
    2: (range(0, 1), range(1, 4)),
    3: (range(0, 2), range(2, 3), range(3, 4)),
    4: tuple(range(i, i + 1) for i in range(4)),
}


def union_of_states(blueprint: Blueprint, cuts: tuple[range, ...], seed: int) -> dict[str, Tensor]:
    state: dict[str, Tensor] = {}
    for cut in cuts:
        state |= build_stage(blueprint, cut, seed=seed).full_state()
    return state


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_values_do_not_depend_on_the_cut(num_stages):
    whole = union_of_states(toy(), CUTS[1], seed=7)
    pieces = union_of_states(toy(), CUTS[num_stages], seed=7)
    assert whole.keys() == pieces.keys()
    torch.testing.assert_close(pieces, whole, **IDENTICAL)


def test_values_depend_on_seed_and_name():
    one, other = (union_of_states(toy(), CUTS[1], seed=seed) for seed in (1, 2))
    assert not torch.equal(one["mix.0.0.weight"], other["mix.0.0.weight"])
    assert not torch.equal(one["mix.0.0.weight"], one["mix.1.0.weight"])


def test_values_do_not_depend_on_what_else_is_in_the_layer():
    class ScoreAndMore(Score):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(9, 9)
            self.parts = {"first": self.first, **self.parts}

    blueprints = (Blueprint((LayerSpec("score", build),), initialize) for build in (Score, ScoreAndMore))
    plain, more = (build_stage(blueprint, range(1), seed=0).full_state() for blueprint in blueprints)
    torch.testing.assert_close(more["score.weight"], plain["score.weight"], **IDENTICAL)


def test_names_are_those_of_the_unsplit_model():
    names = set(build_stage(toy(), range(2, 4), seed=0).full_state())
    norm = {f"mix.1.1.{n}" for n in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")}
    linear = {"mix.1.0.weight", "mix.1.0.bias", "norm.weight", "norm.bias", "score.weight", "score.bias"}
    assert names == norm | linear


def test_buffers_keep_what_their_constructors_computed():
    stage = build_stage(toy(), range(1, 4), seed=0)
    state = stage.full_state()
    torch.testing.assert_close(state["mix.0.1.running_var"], torch.ones(4), **IDENTICAL)
    torch.testing.assert_close(state["mix.0.1.num_batches_tracked"], torch.tensor(0), **IDENTICAL)
    torch.testing.assert_close(stage.get_submodule("layers.2.norm").shift, torch.arange(4.0), **IDENTICAL)


class Remembering(nn.Module):
    """Adds up what it has seen, in a buffer."""

    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()), persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(x.detach().mean())
        return x + self.seen


def test_what_a_forward_keeps_must_be_in_checkpoints():
    """A resume and an evaluation began without it."""
    for persistent in (True, False):
        layer = LayerSpec("one", lambda kept=persistent: Chain({"one": Remembering(kept)}))
        describe = partial(stage_output_examples, Blueprint((layer,), initialize), [range(1)], torch.ones(2, 4), "fp32")
        if persistent:
            assert describe()[0][0].shape == (2, 4)
            continue
        with pytest.raises(ModelError, match=r"must be in checkpoints, .* got Remembering\.seen; register it"):
            describe()


def test_building_and_describing_leave_the_random_state_alone():
    before = torch.get_rng_state()
    build_stage(toy(), range(4), seed=3)
    stage_output_examples(toy(), CUTS[2], IDS, "fp32")
    torch.testing.assert_close(torch.get_rng_state(), before, **IDENTICAL)


def test_values_do_not_depend_on_the_random_state():
    states = []
    for global_seed in (0, 1):
        torch.manual_seed(global_seed)
        states.append(union_of_states(toy(), CUTS[1], seed=5))
    torch.testing.assert_close(states[0], states[1], **IDENTICAL)


def test_only_the_layers_asked_for_are_built():
    def refuse() -> Layer:
        raise AssertionError("built a layer of another stage")

    blueprint = Blueprint((*toy().layers[:2], LayerSpec("other", refuse)), initialize)
    assert len(build_stage(blueprint, range(2), seed=0).layers) == 2


def test_composed_stages_are_the_whole_model():
    whole = build_stage(toy(), range(4), seed=0)
    x: tuple[Tensor, ...] = (IDS,)
    for cut in CUTS[3]:
        out = build_stage(toy(), cut, seed=0)(*x)
        x = out if isinstance(out, tuple) else (out,)
    torch.testing.assert_close(x[0], whole(IDS), **IDENTICAL)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_examples_are_what_the_stages_put_out(num_stages, precision):
    x: tuple[Tensor, ...] = (IDS,)
    with torch.no_grad():
        examples = stage_output_examples(toy(), CUTS[num_stages], IDS, precision)
    for cut, example in zip(CUTS[num_stages], examples, strict=True):
        out = build_stage(toy(), cut, seed=0, precision=precision)(*x)
        x = out if isinstance(out, tuple) else (out,)
        assert [(t.shape, t.dtype, t.requires_grad) for t in x] == [
            (e.shape, e.dtype, e.requires_grad) for e in example
        ]
        assert all(e.is_meta and e.is_leaf for e in example)


def test_examples_as_literals():
    [first, second, _] = stage_output_examples(toy(), CUTS[3], IDS.to("meta"), "bf16")
    assert [(e.dtype, tuple(e.shape), e.requires_grad) for e in first] == [
        (torch.bfloat16, (3, 4), True),
        (torch.int64, (3,), False),
    ]
    assert [e.dtype for e in second] == [torch.bfloat16, torch.int64]
    [plain, *_] = stage_output_examples(toy(), CUTS[3], IDS, "fp32")
    assert plain[0].dtype == torch.float32


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_examples_of_a_layer_with_scripted_functions():
    """DeBERTa of transformers 5.0 to 5.22 has some, whose constants are tensors with data beside those without."""

    class Scripted(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.score = nn.Linear(4, 3)
            self.parts = {"score": self.score}
            self.clip = torch.jit.script(clip)

        def forward(self, x: Tensor) -> Tensor:
            return self.clip(self.score(x), 2)

    blueprint = Blueprint((LayerSpec("scripted", Scripted),), initialize)
    [[example]] = stage_output_examples(blueprint, [range(1)], torch.zeros(2, 4), "fp32")
    assert (example.shape, example.dtype, example.requires_grad) == ((2, 3), torch.float32, True)


def clip(x: Tensor, limit: int) -> Tensor:
    return torch.where(x < limit, x, torch.tensor(float(limit)))


def test_a_floating_tensor_that_needs_no_gradient_says_so():
    class Beside(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.score = nn.Linear(4, 3)
            self.parts = {"score": self.score}

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.score(x), x.mean(dim=1)

    blueprint = Blueprint((LayerSpec("beside", Beside), LayerSpec("score", Score)), initialize)
    [[scores, mean]] = stage_output_examples(blueprint, CUTS[2][:1], torch.zeros(2, 4), "fp32")
    assert (scores.requires_grad, mean.requires_grad) == (True, False)
    assert (scores.shape, mean.shape) == ((2, 3), (2,))


def test_bf16_differs_from_fp32_but_not_much():
    exact, rounded = (build_stage(toy(), range(4), seed=0, precision=p)(IDS).float() for p in ("fp32", "bf16"))
    error = (exact - rounded).abs().max().item()
    assert 1e-5 < error < 0.1, error


def test_full_state_shares_memory_with_the_stage():
    stage = build_stage(toy(), range(1, 3), seed=0)
    before = stage.full_state()["mix.0.0.weight"].clone()
    with torch.no_grad():
        stage.full_state()["mix.0.0.weight"].add_(1)
    torch.testing.assert_close(stage.layers[0].block[0].weight, before + 1, **IDENTICAL)


def test_a_tensor_that_initialize_leaves_out_is_an_error():
    def weights_only(full_name: str, module: nn.Module) -> None:
        nn.init.ones_(module.weight)

    with pytest.raises(ModelError, match=r"must fill all of norm, but left out bias"):
        build_stage(Blueprint((LayerSpec("score", Score),), weights_only), range(1), seed=0)


def test_parents_are_initialized_after_their_children_and_may_refill_them():
    order = []

    def note(full_name: str, module: nn.Module) -> None:
        order.append(full_name)
        initialize(full_name, module)
        if full_name == "mix.0":
            nn.init.constant_(module[0].weight, 5.0)

    stage = build_stage(Blueprint((LayerSpec("mix", partial(Mix, 0)),), note), range(1), seed=0)
    assert order == ["mix.0.1", "mix.0.0", "mix.0"]
    assert (stage.full_state()["mix.0.0.weight"] == 5).all()


def test_constructors_make_no_weights_and_draw_no_numbers():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    with parameters_on_meta():
        made = ShiftedNorm(), nn.Linear(4, 3), nn.BatchNorm1d(4)
    assert all(parameter.is_meta for module in made for parameter in module.parameters())
    torch.testing.assert_close(made[0].shift, torch.arange(4.0), **IDENTICAL)
    torch.testing.assert_close(made[2].running_var, torch.ones(4), **IDENTICAL)
    torch.testing.assert_close(torch.get_rng_state(), before, **IDENTICAL)
    assert not nn.Linear(1, 1).weight.is_meta


class Masked(Layer):
    """Adds what it is told; an offset is optional."""

    side, optional_side = ("mask",), ("offset",)

    def __init__(self, index: int = 0) -> None:
        super().__init__()
        self.scale = nn.Linear(4, 4)
        self.parts = {f"masked.{index}": self.scale}

    def forward(self, x: Tensor, *, mask: Tensor, offset: Tensor | float = 0.0) -> Tensor:
        return self.scale(x) * mask + offset


def masked() -> Blueprint:
    plain = LayerSpec("plain", PassOn)
    return Blueprint((plain, LayerSpec("masked", Masked)), initialize, side=("mask", "offset"))


class PassOn(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.parts = {}

    def forward(self, x: Tensor) -> Tensor:
        return x


def test_each_layer_is_given_the_side_inputs_it_names():
    stage = build_stage(masked(), range(2), seed=0)
    x, mask, offset = torch.ones(2, 4), torch.tensor([[1.0], [0.0]]), torch.tensor(3.0)
    expected = stage.layers[1].scale(x) * mask
    torch.testing.assert_close(stage(x, mask=mask, other=x), expected, **IDENTICAL)
    torch.testing.assert_close(stage(x, mask=mask, offset=offset), expected + 3, **IDENTICAL)
    [[example]] = stage_output_examples(masked(), [range(2)], x, "fp32", {"mask": mask.to("meta").expand(2, 4)})
    assert (example.shape, example.requires_grad) == ((2, 4), True)
    with pytest.raises(ModelError, match="needs the side inputs mask, got offset"):
        stage(x, offset=offset)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_shared_part_is_one_module_on_a_stage(dtype):
    class Twice(Mix):
        def __init__(self, index: int) -> None:
            super().__init__(index)
            self.shared = nn.Linear(4, 4)
            self.parts = {**self.parts, "shared": self.shared}

        def forward(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
            return self.block(self.shared(x)), ids

    def scaled(full_name: str, module: nn.Module) -> None:
        """Draws other numbers into narrow weights than the rounded ones of wide weights."""
        for parameter in module.parameters(recurse=False):
            parameter.normal_().mul_(0.3)

    layers = tuple(LayerSpec(f"mix {index}", partial(Twice, index)) for index in range(3))
    blueprint = Blueprint(layers, scaled, shared=("shared",), weights_dtype=dtype)
    both, last = build_stage(blueprint, range(2), seed=0), build_stage(blueprint, range(2, 3), seed=0)
    assert both.layers[0].shared is both.layers[1].shared
    torch.testing.assert_close(last.layers[0].shared.weight, both.layers[0].shared.weight, **IDENTICAL)
    assert sum(parameter.shape == (4, 4) for parameter in both.parameters()) == 3


class Stored:
    """A checkpoint that lacks some tensors, and has 2 for all others."""

    def __init__(self, *missing: str) -> None:
        self.missing = missing

    def lacking(self, names: list[str]) -> list[str]:
        return [name for name in names if name in self.missing]

    def fill(self, tensors: dict[str, Tensor]) -> None:
        for tensor in tensors.values():
            tensor.fill_(2)


def test_a_checkpoint_fills_and_the_seed_gives_what_it_lacks():
    plain = build_stage(toy(), range(3, 4), seed=4).full_state()
    filled = Blueprint(toy().layers, initialize, checkpoint=Stored())
    assert all((tensor == 2).all() for tensor in build_stage(filled, range(4), seed=4).full_state().values())
    partly = Blueprint(toy().layers, initialize, checkpoint=Stored("score.weight"))
    with pytest.warns(UserWarning, match=r"the checkpoint has no score\.weight; the seed gives their values"):
        state = build_stage(partly, range(3, 4), seed=4).full_state()
    torch.testing.assert_close(state["score.weight"], plain["score.weight"], **IDENTICAL)
    assert (state["score.bias"] == 2).all()


def test_a_tensor_outside_all_parts_is_an_error():
    class Forgetful(Score):
        def __init__(self) -> None:
            super().__init__()
            del self.parts["norm"]

    with pytest.raises(ModelError, match=r"layer 'only' must belong to a part"):
        build_stage(broken(Forgetful), range(1), seed=0)


def test_two_parts_of_one_name_are_an_error():
    blueprint = Blueprint((LayerSpec("a", Score), LayerSpec("b", Score)), initialize)
    with pytest.raises(ModelError, match=r"got norm, score more than once"):
        build_stage(blueprint, range(2), seed=0)
