"""Mixture-of-experts MLPs in plain PyTorch: slow, exact, and the definition of what a faster build must compute.

    moe_general_routing_inputs    (token, expert, score) triples in any number a token
    moe_TC_softmax_topk_layer     a router in front of it: the best K experts of each token
    enums.ActivationType          what lies between the two products

Runs on every device, with torch 2.6 or later, under autograd and torch.compile. What published builds have besides, a
module for training with weights of its own, is not here.
"""

from . import enums
from .layer import moe_general_routing_inputs, moe_TC_softmax_topk_layer

__all__ = ["enums", "moe_TC_softmax_topk_layer", "moe_general_routing_inputs"]
