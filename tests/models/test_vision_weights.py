from urllib.error import URLError

import pytest
import torch
from safetensors.torch import load_file
from torchvision.models import ResNet18_Weights, get_model

from thinwire.models.architectures.vision import weights_folder
from thinwire.models.errors import ModelError


@pytest.fixture
def downloads(tmp_path, monkeypatch):
    """Stands for the network: the states that were asked for, and what each then returned."""
    asked = []

    def get_state_dict(weights, *args, **kwargs):
        state = get_model("resnet18").state_dict()
        asked.append((weights, state))
        return state

    monkeypatch.setattr(ResNet18_Weights, "get_state_dict", get_state_dict)
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    return asked


@pytest.mark.slow
def test_weights_are_downloaded_once(downloads, tmp_path):
    folder = weights_folder("resnet18", "DEFAULT")
    assert folder == tmp_path / "checkpoints" / "resnet18-IMAGENET1K_V1"
    [(weights, state)] = downloads
    assert weights is ResNet18_Weights.IMAGENET1K_V1
    torch.testing.assert_close(load_file(folder / "model.safetensors"), dict(state), rtol=0, atol=0)
    assert weights_folder("resnet18", "IMAGENET1K_V1") == folder
    assert len(downloads) == 1
    assert [path.name for path in folder.iterdir()] == ["model.safetensors"]
    (tmp_path / "plain").touch()
    assert (folder / "model.safetensors").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_failed_download_is_one_sentence(downloads, monkeypatch):
    def unreachable(*args, **kwargs):
        raise URLError("no network")

    monkeypatch.setattr(ResNet18_Weights, "get_state_dict", unreachable)
    with pytest.raises(ModelError, match=r"https://.*\.pth cannot be downloaded: .*no network.*; give a folder"):
        weights_folder("resnet18", "DEFAULT")


def test_unknown_weights():
    with pytest.raises(ModelError, match=r"folder with .* or IMAGENET1K_V1, DEFAULT, got 'IMAGENET'"):
        weights_folder("resnet18", "IMAGENET")
