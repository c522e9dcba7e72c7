"""How much work a PyTorch operation is: its FLOPs, its bytes, and what it reads and writes.

FLOPs come from PyTorch's own formulas (`torch.utils.flop_counter`): products, convolutions and
attention, forward and backward. Everything else is bound by memory: the bytes of its operands and
results, each moved once.
"""

from __future__ import annotations

import torch

from . import private

# Operations that launch no kernel: they allocate, or only look at a tensor's description.
NO_KERNEL = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view",
    "lift_fresh", "lift", "lift_fresh_copy", "is_pinned",
    "detach_", "device", "is_same_size", "_has_compatible_shallow_copy_type", "sym_size",
    "sym_stride", "sym_numel", "sym_storage_offset", "is_contiguous", "_nested_tensor_size",
    "_assert_tensor_metadata", "_sparse_coo_tensor_with_dims_and_tensors", "_coalesced_",
    "_sparse_coo_tensor_unsafe", "_indices", "_values", "indices", "values", "is_coalesced",
    "_validate_sparse_coo_tensor_args", "_dimI", "_dimV", "_nnz", "sparse_dim", "dense_dim",
}  # fmt: skip
# Operations that overwrite their first operand without reading it.
OVERWRITES = {
    "copy_", "fill_", "zero_", "uniform_", "normal_", "random_", "bernoulli_", "exponential_",
}  # fmt: skip
# Operations that read only the rows they are asked for.
GATHERS = {"index", "embedding", "gather", "index_select", "_index_put_impl_", "index_put_",
           "index_put", "_unsafe_index", "_unsafe_index_put"}  # fmt: skip
# Operations that may take an operand from the host, and which one: indices, lengths.
FROM_HOST = {
    **dict.fromkeys(
        ("index", "_index_put_impl_", "index_put_", "index_put", "_unsafe_index",
         "_unsafe_index_put", "_pack_padded_sequence", "_pad_packed_sequence"), 1
    ),
    "_pack_padded_sequence_backward": 2,
}  # fmt: skip
# Operations whose result's shape or value the host must know before it can go on.
SYNCHRONISES = {"nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive",
                "equal", "is_nonzero", "_local_scalar_dense", "_assert_async"}  # fmt: skip


class Work:
    """What one operation (an `OpOverload`) does, worked out once."""

    __slots__ = ("name", "kernel", "writes", "overwrites", "gathers", "from_host", "resizes",
                 "synchronises", "composite", "random", "formula")  # fmt: skip

    def __init__(self, op):
        schema = op._schema
        name = schema.name.split("::")[-1]
        returns_view = bool(schema.returns) and all(
            ret.alias_info is not None and not ret.alias_info.is_write for ret in schema.returns
        )
        self.name = name
        self.kernel = not (returns_view or name in NO_KERNEL)
        self.writes = frozenset(
            argument.name if argument.kwarg_only else position
            for position, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        )
        self.overwrites = name in OVERWRITES
        self.gathers = name in GATHERS
        self.from_host = FROM_HOST.get(name)
        self.resizes = any(argument.is_out for argument in schema.arguments)
        self.synchronises = name in SYNCHRONISES
        self.random = torch.Tag.nondeterministic_seeded in op.tags
        self.composite = private.is_composite(op)
        self.formula = private.flop_formula(op.overloadpacket)

    def flops(self, args, kwargs, result) -> int:
        """Floating-point operations, a multiply-add counted as two; 0 where memory is the bound."""
        if self.formula is None:
            return 0
        kwargs = {name: shape(value) for name, value in kwargs.items()}
        return self.formula(*map(shape, args), out_shape=shape(result), **kwargs)


def shape(value):
    """A tensor's shape, and that of each tensor in a tuple or list; anything else as it is."""
    if isinstance(value, torch.Tensor):
        return value.shape
    if isinstance(value, (tuple, list)):
        return [shape(item) for item in value]
    return value
