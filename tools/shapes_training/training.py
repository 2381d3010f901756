"""Trains the networks of `shapes`: the VAE, then the UNet on its latents, then crisper decoding."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as functional
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from torch import nn
from transformers import CLIPTextModel, CLIPTokenizer

from shapes_training.models import build_scheduler, build_text_encoder, build_unet, build_vae
from shapes_training.pictures import as_tensor, random_examples
from shapes_training.tokenizer import build_tokenizer

log = logging.getLogger(__name__)

_VAE_BATCH = 10
_VAE_RATE = 2e-3
_KL_WEIGHT = 1e-3
_UNET_BATCH = 32
_UNET_RATE = 1e-3
_UNSAID_CAPTION = 0.1
_DECODER_RATE = 1.5e-3
# The spread of what the UNet gets wrong, so that the decoder learns to forgive it.
_LATENT_ERROR = 0.05
_LOG_EVERY = 200


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to train."""

    pictures: int
    vae_steps: int
    unet_steps: tuple[int, int]
    decoder_steps: int
    average_decay: float


FULL = Effort(6_000, 1_800, unet_steps=(2_400, 4_000), decoder_steps=2_000, average_decay=0.998)
QUICK = Effort(200, 20, unet_steps=(10, 10), decoder_steps=20, average_decay=0.9)


def train(effort: Effort, seed: int) -> StableDiffusionPipeline:
    examples = random_examples(effort.pictures, seed)
    pictures = as_tensor(examples)
    vae = train_vae(pictures, effort, seed)
    latents = encode(vae, pictures)
    tokenizer = build_tokenizer()
    tokens = tokenize(tokenizer, [example.caption for example in examples])
    scheduler = build_scheduler()
    painter = build_painter(tokenizer, vae, seed)
    for cycle, steps in enumerate(effort.unet_steps):
        # A second cycle of the learning rate, from the average of the first, mends wobbly outlines.
        if cycle:
            torch.manual_seed(seed + cycle)
        painter = train_painter(
            painter, scheduler, latents, tokens, steps=steps, decay=effort.average_decay
        )
    sharpen_decoder(vae, latents, pictures, effort, seed)
    return StableDiffusionPipeline(
        vae=vae,
        text_encoder=painter.text_encoder,
        tokenizer=tokenizer,
        unet=painter.unet,
        scheduler=scheduler,
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


# Each part of the training starts from the seed, so that one can be run again without the others.


def train_vae(pictures: torch.Tensor, effort: Effort, seed: int) -> AutoencoderKL:
    torch.manual_seed(seed)
    vae = build_vae().train()
    for step, indices in _steps("vae", effort.vae_steps, len(pictures), _VAE_BATCH, vae, _VAE_RATE):
        batch = pictures[indices]
        # Half precision is a third faster here; for the UNet it is slower on the CPUs tried.
        with torch.autocast("cpu", torch.bfloat16):
            posterior = vae.encode(batch).latent_dist
            decoded = vae.decode(posterior.sample()).sample.float()
        step.finish(
            _difference(decoded, batch)
            + _KL_WEIGHT * posterior.kl().mean() / posterior.mean[0].numel()
        )
    return vae.eval()


def sharpen_decoder(
    vae: AutoencoderKL, latents: torch.Tensor, pictures: torch.Tensor, effort: Effort, seed: int
) -> None:
    """Trains the decoder alone: the latents, on which the UNet relies, stay as they are."""
    torch.manual_seed(seed)
    decoder = vae.decoder.train()
    count, rate = effort.decoder_steps, _DECODER_RATE
    for step, indices in _steps("decoder", count, len(pictures), _VAE_BATCH, decoder, rate):
        exact = latents[indices]
        with torch.autocast("cpu", torch.bfloat16):
            near = exact + _LATENT_ERROR * torch.randn_like(exact)
            decoded = vae.decode(near / vae.config.scaling_factor).sample.float()
        batch = pictures[indices]
        step.finish(_difference(decoded, batch) + _edge_difference(decoded, batch))
    decoder.eval()


def _difference(decoded: torch.Tensor, pictures: torch.Tensor) -> torch.Tensor:
    # The square alone would leave edges soft.
    return functional.mse_loss(decoded, pictures) + functional.l1_loss(decoded, pictures)


def _edge_difference(decoded: torch.Tensor, pictures: torch.Tensor) -> torch.Tensor:
    # Most pixels are plain, so a small star would hardly count without its outline.
    down, across = (
        functional.l1_loss(decoded.diff(dim=axis), pictures.diff(dim=axis)) for axis in (2, 3)
    )
    return down + across


@torch.no_grad()
def encode(vae: AutoencoderKL, pictures: torch.Tensor) -> torch.Tensor:
    """Latents of unit spread; the VAE's configuration keeps the factor that makes them so."""
    means = [vae.encode(part).latent_dist.mean for part in torch.split(pictures, 200)]
    latents = torch.cat(means)
    factor = 1 / latents.std().item()
    vae.register_to_config(scaling_factor=factor)
    return latents * factor


def tokenize(tokenizer: CLIPTokenizer, captions: list[str]) -> torch.Tensor:
    # Padded as the pipeline pads, so that training sees what drawing will see.
    encoded = tokenizer(captions, padding="max_length", truncation=True, return_tensors="pt")
    tokens: torch.Tensor = encoded.input_ids
    return tokens


class Painter(nn.Module):
    """The two networks that learn together what words look like."""

    def __init__(self, text_encoder: CLIPTextModel, unet: UNet2DConditionModel) -> None:
        super().__init__()
        self.text_encoder = text_encoder
        self.unet = unet

    def forward(
        self, noisy: torch.Tensor, times: torch.Tensor, tokens: torch.Tensor
    ) -> torch.Tensor:
        words = self.text_encoder(tokens).last_hidden_state
        velocity: torch.Tensor = self.unet(noisy, times, words).sample
        return velocity


def build_painter(tokenizer: CLIPTokenizer, vae: AutoencoderKL, seed: int) -> Painter:
    torch.manual_seed(seed)
    return Painter(build_text_encoder(tokenizer), build_unet(vae))


def train_painter(
    painter: Painter,
    scheduler: DDIMScheduler,
    latents: torch.Tensor,
    tokens: torch.Tensor,
    *,
    steps: int,
    decay: float,
) -> Painter:
    """Returns the average of the painter's weights over the last steps, which draws better."""
    average = copy.deepcopy(painter).requires_grad_(False).eval()
    painter.requires_grad_(True).train()
    unsaid = tokenize_nothing(tokens)
    for step, indices in _steps("unet", steps, len(latents), _UNET_BATCH, painter, _UNET_RATE):
        clean, said = latents[indices], tokens[indices]
        said = torch.where(torch.rand(len(indices), 1) < _UNSAID_CAPTION, unsaid, said)
        noise = torch.randn_like(clean)
        times = torch.randint(scheduler.config.num_train_timesteps, (len(indices),))
        noisy = scheduler.add_noise(clean, noise, times)
        wanted = scheduler.get_velocity(clean, noise, times)
        step.finish(functional.mse_loss(painter(noisy, times, said), wanted))
        _follow(average, painter, decay)
    return average


def tokenize_nothing(tokens: torch.Tensor) -> torch.Tensor:
    """The empty caption: the start token, then padding (which ends every caption here)."""
    return torch.cat([tokens[:1, :1], tokens[:1, -1:].expand(1, tokens.shape[1] - 1)], dim=1)


@torch.no_grad()
def _follow(average: nn.Module, model: nn.Module, decay: float) -> None:
    for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
        slow.lerp_(fast, 1 - decay)


class _Step:
    """One optimiser step, finished with the loss."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        schedule: torch.optim.lr_scheduler.LRScheduler,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._schedule = schedule
        self.loss = float("nan")

    def finish(self, loss: torch.Tensor) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._schedule.step()
        self.loss = loss.item()


def _steps(
    name: str, count: int, examples: int, batch: int, model: nn.Module, rate: float
) -> Iterator[tuple[_Step, torch.Tensor]]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=rate, total_steps=count)
    step = _Step(model, optimizer, schedule)
    started = time.monotonic()
    for done in range(1, count + 1):
        yield step, torch.randint(examples, (batch,))
        if done % _LOG_EVERY == 0 or done == count:
            elapsed_s = time.monotonic() - started
            log.info("%s step %d of %d: loss %.4f, %.0f s", name, done, count, step.loss, elapsed_s)
