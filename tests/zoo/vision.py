"""Tiny vision models of transformers, timm, torchvision and diffusers, and graph networks."""

from __future__ import annotations

from typing import Any

import timm
import torch
import torch_geometric.nn as graphs
import transformers as hf
from cases import Batch, case, logits_of, tokens
from diffusers import DiTTransformer2DModel, UNet2DModel
from timm.models.mlp_mixer import MlpMixer
from torch import Tensor, nn
from torch.nn import functional
from torchvision.models import detection, mobilenet_v3_small
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.ops import FrozenBatchNorm2d

SIDE, CLASSES = 32, 10
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "image_size": SIDE,
    "patch_size": 8,
}


def images(side: int = SIDE) -> Batch:
    return {"images": torch.randn(4, 3, side, side), "labels": torch.randint(0, CLASSES, (4,))}


def classify(model: nn.Module, batch: Batch) -> Tensor:
    return functional.cross_entropy(logits_of(model(batch["images"])).float(), batch["labels"])


def from_timm(name: str, entry: str, **arguments: Any) -> None:
    case(name, lambda: images(arguments.get("img_size", SIDE)), classify)(
        lambda: timm.create_model(entry, pretrained=False, num_classes=CLASSES, **arguments)
    )


from_timm("ResNet", "test_resnet")
from_timm("timm ViT", "test_vit", img_size=SIDE, patch_size=8)
from_timm(
    "Swin", "swin_tiny_patch4_window7_224", img_size=SIDE, patch_size=2, window_size=4,
    embed_dim=24, depths=(1, 1, 2, 1), num_heads=(2, 2, 4, 4),
)  # fmt: skip
from_timm("ConvNeXt", "test_convnext")
from_timm("EfficientNet", "test_efficientnet")


@case("Mixer", images, classify)
def mixer() -> nn.Module:
    return MlpMixer(CLASSES, SIDE, patch_size=8, num_blocks=2, embed_dim=64)


from_timm("EVA-02", "eva02_tiny_patch14_224", img_size=SIDE, patch_size=8, embed_dim=48, depth=2,
          num_heads=3)  # fmt: skip
from_timm("MaxViT", "test_maxvit", img_size=128)
from_timm("NFNet", "test_nfnet")


@case("ViT", images, classify)
def vit() -> nn.Module:
    return hf.ViTForImageClassification(hf.ViTConfig(**SIZES, num_labels=CLASSES))


@case("DINOv2", images, classify)
def dino() -> nn.Module:
    return hf.Dinov2ForImageClassification(hf.Dinov2Config(**SIZES, num_labels=CLASSES))


def pairs() -> Batch:
    return {"images": torch.randn(4, 3, SIDE, SIDE), "tokens": tokens(96, 4, 12)}


def contrast(model: nn.Module, batch: Batch) -> Tensor:
    found = model(input_ids=batch["tokens"], pixel_values=batch["images"])
    return functional.cross_entropy(found.logits_per_image.float(), torch.arange(4))


@case("CLIP", pairs, contrast)
def clip() -> nn.Module:
    text = {k: v for k, v in SIZES.items() if k not in ("image_size", "patch_size")}
    more = {"vocab_size": 96, "max_position_embeddings": 16, "eos_token_id": 2, "bos_token_id": 1}
    config = hf.CLIPConfig(
        text_config={**text, **more},
        vision_config={**SIZES, "projection_dim": 32},
        projection_dim=32,
    )
    return hf.CLIPModel(config)


def points() -> Batch:
    return {
        "images": torch.randn(2, 3, 64, 64),
        "points": torch.rand(2, 1, 2, 2) * 64,
        "masks": (torch.rand(2, 16, 16) > 0.5).float(),
    }


def segment(model: nn.Module, batch: Batch) -> Tensor:
    found = model(
        pixel_values=batch["images"], input_points=batch["points"], multimask_output=False
    )
    masks = found.pred_masks.float()
    wanted = functional.interpolate(batch["masks"].float()[:, None], masks.shape[-2:])
    return functional.binary_cross_entropy_with_logits(masks[:, 0], wanted)


@case("SAM", points, segment)
def sam() -> nn.Module:
    seen = {**SIZES, "image_size": 64, "output_channels": 32, "window_size": 4, "mlp_dim": 128}
    seen |= {"global_attn_indexes": [1], "num_pos_feats": 16, "initializer_range": 0.02}
    prompt = {"hidden_size": 32, "image_size": 64, "patch_size": 8, "mask_input_channels": 4}
    mask = {"hidden_size": 32, "mlp_dim": 64, "num_attention_heads": 2, "iou_head_hidden_dim": 32}
    config = hf.SamConfig(
        vision_config=seen, prompt_encoder_config=prompt, mask_decoder_config=mask
    )
    return hf.SamModel(config)


def scenes() -> Batch:
    boxes = torch.tensor([[4.0, 4.0, 30.0, 34.0], [20.0, 10.0, 60.0, 50.0]])
    return {
        "images": [torch.rand(3, 64, 64), torch.rand(3, 64, 64)],
        "boxes": [boxes, boxes.flip(0)],
        "labels": [torch.tensor([1, 2]), torch.tensor([2, 3])],
    }


def detect(model: nn.Module, batch: Batch) -> Tensor:
    rows = zip(batch["boxes"], batch["labels"], strict=True)
    losses = model(batch["images"], [{"boxes": b, "labels": n} for b, n in rows])
    return sum(loss.float() for loss in losses.values())


class Backbone(nn.Sequential):
    out_channels = 16


def backbone(norm: type[nn.Module]) -> nn.Module:
    first = [nn.Conv2d(3, 16, 3, 4, 1), norm(16), nn.ReLU()]
    return Backbone(*first, nn.Conv2d(16, 16, 3, 2, 1), norm(16), nn.ReLU())


SIZE = {"min_size": 64, "max_size": 64}


@case("RetinaNet", scenes, detect)
def retina() -> nn.Module:
    anchors = AnchorGenerator(((16, 32),), ((0.5, 1.0, 2.0),))
    return detection.RetinaNet(backbone(FrozenBatchNorm2d), 5, anchor_generator=anchors, **SIZE)


@case("Faster R-CNN", scenes, detect)
def faster() -> nn.Module:
    anchors = AnchorGenerator(((16, 32),), ((0.5, 1.0, 2.0),))
    return detection.FasterRCNN(
        backbone(nn.BatchNorm2d), rpn_anchor_generator=anchors,
        box_head=detection.faster_rcnn.TwoMLPHead(16 * 7 * 7, 64),
        box_predictor=detection.faster_rcnn.FastRCNNPredictor(64, 5), **SIZE,
        box_roi_pool=detection.faster_rcnn.MultiScaleRoIAlign(["0"], 7, 2),
    )  # fmt: skip


case("MobileNetV3", images, classify)(lambda: mobilenet_v3_small(num_classes=CLASSES, dropout=0.0))


def noise() -> Batch:
    times = torch.tensor([3, 500])
    wanted = torch.randn(2, 4, 16, 16)
    return {"images": torch.randn(2, 4, 16, 16), "times": times, "wanted": wanted}


def denoise(model: nn.Module, batch: Batch) -> Tensor:
    more = (
        {"class_labels": torch.tensor([1, 2])} if isinstance(model, DiTTransformer2DModel) else {}
    )
    found = model(batch["images"], batch["times"], **more).sample
    return functional.mse_loss(found[:, :4].float(), batch["wanted"].float())


@case("UNet2D", noise, denoise)
def unet() -> nn.Module:
    return UNet2DModel(
        sample_size=16, in_channels=4, out_channels=4, layers_per_block=1, norm_num_groups=4,
        block_out_channels=(16, 32), down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"), attention_head_dim=8,
    )  # fmt: skip


@case("DiT", noise, denoise)
def dit() -> nn.Module:
    return DiTTransformer2DModel(
        num_attention_heads=4, attention_head_dim=16, in_channels=4, num_layers=2, sample_size=16,
        patch_size=2, num_embeds_ada_norm=10,
    )  # fmt: skip


def graph() -> Batch:
    edges = torch.randint(0, 40, (2, 160))
    return {
        "nodes": torch.randn(40, 16),
        "edges": edges,
        "labels": torch.randint(0, CLASSES, (40,)),
    }


def label_nodes(model: nn.Module, batch: Batch) -> Tensor:
    return functional.cross_entropy(model(batch["nodes"], batch["edges"]).float(), batch["labels"])


case("GCN", graph, label_nodes)(lambda: graphs.GCN(16, 32, 3, CLASSES, norm="LayerNorm"))
case("GAT", graph, label_nodes)(lambda: graphs.GAT(16, 32, 3, CLASSES, heads=4, norm="GraphNorm"))
case("GIN", graph, label_nodes)(lambda: graphs.GIN(16, 32, 3, CLASSES, norm="BatchNorm"))
