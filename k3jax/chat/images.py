"""How many tokens an image takes in the prompt."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class ImagePlan:
    """The size an image is brought to before it is cut into patches."""

    new_width: int  # after resizing; images are never enlarged
    new_height: int
    pad_width: int  # black columns added on the right, then rows at the bottom
    pad_height: int
    num_tokens: int  # merged patches, one prompt token each


def plan_image(
    width: int,
    height: int,
    *,
    patch_size: int = 14,
    merge_kernel_size: int = 2,
    in_patch_limit: int = 65_536,
    patch_limit_on_one_side: int = 512,
) -> ImagePlan:
    """The plan for an image of `width` x `height` pixels; the defaults are the released model's."""
    p, factor = patch_size, patch_size * merge_kernel_size
    longest_side = patch_limit_on_one_side * p
    patches = max(1, width // p) * max(1, height // p)
    scale = min(
        1.0, math.sqrt(in_patch_limit / patches), longest_side / width, longest_side / height
    )
    new_width = min(max(1, int(width * scale)), longest_side)
    new_height = min(max(1, int(height * scale)), longest_side)
    pad_width, pad_height = -new_width % factor, -new_height % factor
    columns, rows = (new_width + pad_width) // factor, (new_height + pad_height) // factor
    return ImagePlan(new_width, new_height, pad_width, pad_height, columns * rows)
