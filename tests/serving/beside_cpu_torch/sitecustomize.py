"""Lets torchvision be imported beside the CPU build of PyTorch, in every Python whose PYTHONPATH names this folder.

The wheel on the package index is linked against the CUDA build, so that its operators cannot be loaded; its Python then
asks for two that nobody has defined. Here they are, without code: nothing that looks at images calls them.
"""

import torch

library = torch.library.Library("torchvision", "DEF")
library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
