"""A client that seeds torch gives its noise away: who knows the seed and the code subtracts it.

Run: python opacus_seeded_noise.py, beside torch and Opacus. Seen with Opacus 1.4.1, 1.5.4 and 1.6.0 on torch 2.13.0.

With secure_mode=False, the default, and no noise_generator, `DPOptimizer` draws noise from torch's global generator,
and the Poisson sampler draws from it before. Where a client calls `torch.manual_seed(42)`, as scripts do that shall be
repeatable, all of these draws are a function of 42, of shapes and of the number of examples. Here a server that knows
these runs the same code on zeros, and takes the noise off what the client sent. The engine's epsilon does not change.
PrivacyEngine's docstring says that secure_mode is to be set where a strong guarantee is required; it needs torchcsprng.
"""

import math
import warnings

import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

warnings.simplefilter("ignore")
LR, NOISE, CLIP, SEED = 0.1, 1.0, 1.0, 42


def network() -> nn.Module:
    """Return the network with the weights that the server sent."""
    generator = torch.Generator().manual_seed(7)
    made = nn.Sequential(nn.Flatten(), nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, 10))
    with torch.no_grad():
        for weight in made.parameters():
            weight.copy_(0.1 * torch.randn(weight.shape, generator=generator))
    return made


def sent(x: torch.Tensor, y: torch.Tensor, noise: float, seed: int) -> tuple[torch.Tensor, float]:
    """Return the change of weights over the rate after one step on all examples, and the engine's epsilon."""
    torch.manual_seed(seed)
    model = network()
    before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    engine = PrivacyEngine(accountant="rdp")
    private, optimizer, loader = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), LR), noise_multiplier=noise, max_grad_norm=CLIP,
        data_loader=DataLoader(TensorDataset(x, y), len(x)),
    )  # fmt: skip
    for inputs, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(private(inputs), labels).backward()
        optimizer.step()
    after = nn.utils.parameters_to_vector(model.parameters()).detach()
    return (before - after).double() / LR, engine.get_epsilon(1e-5) if noise else math.inf


def image(gradient: torch.Tensor) -> torch.Tensor:
    """Return the input by the first layer's gradients: those of a row over that of its bias."""
    weight, bias = gradient[: 784 * 32].view(32, 784), gradient[784 * 32 : 785 * 32]
    row = int(bias.abs().argmax())
    return weight[row] / bias[row]


def psnr(result: torch.Tensor, truth: torch.Tensor) -> float:
    """Return the peak signal-to-noise ratio in dB of pixels in 0..1."""
    return float(-10 * torch.log10((result.clamp(0, 1) - truth).square().mean()))


def main() -> None:
    """Print what the server makes of one client's update, with the seed and with another one."""
    x, y = torch.rand(1, 1, 28, 28, generator=torch.Generator().manual_seed(1)), torch.tensor([3])
    clean, _ = sent(x, y, 0.0, SEED)
    update, epsilon = sent(x, y, NOISE, SEED)
    print(f"noise multiplier {NOISE:g}, clipping norm {CLIP:g}, one step on one example: epsilon {epsilon:.2f}")
    for seed in (SEED, 43):
        zeros = torch.zeros_like(x), torch.zeros_like(y)
        noise = sent(*zeros, NOISE, seed)[0] - sent(*zeros, 0.0, seed)[0]
        left = update - noise
        apart = float((left - clean).norm() / clean.norm())
        print(f"noise of seed {seed} taken off: {apart:.1e} from the clipped gradient, image at ", end="")
        print(f"{psnr(image(left), x.flatten().double()):.1f} dB")


if __name__ == "__main__":
    main()
