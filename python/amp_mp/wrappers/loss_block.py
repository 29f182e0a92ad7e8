"""Block: a scaled loss under way, and the blocks around it and inside of it."""

from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from amp_mp import _C
from amp_mp.sharding import gradients, reduction
from amp_mp.torch_private import at_end_of_backward, current_backward
from amp_mp.wrappers import ledger
from amp_mp.wrappers.carriers import Carrier, Earlier, Found, Pairs, added, kept, params_of

Gradients = dict[Tensor, Tensor | None]


class Block:
    """A loss under way: it goes backward at this scale, and is collected unless it is delayed."""

    under_way: ClassVar[dict[int, "Block"]] = {}  # by id, the innermost last

    def __init__(self, carriers: Sequence[Carrier], scale: float, delays: bool) -> None:
        self.carriers = carriers
        self.scale = scale
        self.delays = delays
        # What `begin` has found of each carrier, at each call; no call while no loss has gone
        # backward: until then a script may clear what there is.
        self._found: list[list[list[Found]]] = []
        self._is_apart = False  # whether the last backward has left true gradients beside its own
        # What this block has put away for each that has interrupted it.
        self._interrupted: dict[Block, tuple[Gradients, list[dict[Tensor, Earlier]]]] = {}
        self.outside: list[Block] = []  # the blocks around this one that it has interrupted
        # Of the last backward pass of this loss: its number, and the blocks inside of this one that
        # it has interrupted.
        self._backward = -1
        self._inside: list[Block] = []
        self._waits_for: Block | None = None  # the loss around this block that goes backward in it

    def prepare(self) -> None:
        """Makes room for a loss that is about to go backward; once the block is over, for none."""
        if self._waits_for is not None:  # its backward pass has failed
            self._waits_for._let_others_go_on()
        if self._found and not self._is_apart:
            return
        if not self._found and len(Block.under_way) > 1:
            blocks = [*Block.under_way.values()]
            self.outside = self._interrupt(blocks[: blocks.index(self)])
        self._is_apart = False
        with torch.no_grad():
            for each in self.carriers:
                each.drop_cleared()
            self._found.append(self.begin([each.pairs() for each in self.carriers]))

    def before_backward(self, _: Tensor, is_own: bool = True) -> None:
        """A hook of the scaled loss.

        is_own: otherwise it is of the loss itself, which a block around this one scales, too.
        """
        number, inside = current_backward(), list[Block]()
        if len(Block.under_way) > 1:
            others = self._also_in(number)
            if is_own and any(each.scale != self.scale for each in others):
                raise RuntimeError(
                    "scale_loss: two losses of the same parameters, with the scales "
                    f"{others[0].scale:g} and {self.scale:g}, went backward in one call, which "
                    "adds their gradients before they can be divided; call backward for each"
                )
            if others or number == self._backward:
                return
            blocks = [*Block.under_way.values()]
            begun = [each for each in blocks[blocks.index(self) + 1 :] if each._found]
            inside = self._interrupt(begun)
            for block in inside:
                block._waits_for = self
        self._backward, self._inside = number, inside
        self.prepare()
        # Behind what backward itself leaves to its end: there FSDP2 sums the shards' gradients.
        at_end_of_backward(partial(at_end_of_backward, self._after_backward))

    def _interrupt(self, blocks: Sequence["Block"]) -> list["Block"]:
        """Puts away what they have of this loss's gradients; returns those that had some."""
        interrupted, left = [], set(params_of(self.carriers))
        # From the innermost on, which has the gradients of parameters that several share.
        for block in reversed(blocks):
            if common := block.interrupt(self, left):
                left.difference_update(common)
                interrupted.append(block)
        return interrupted

    def _also_in(self, backward: int) -> list["Block"]:
        """The other losses of the same parameters that go backward in this pass."""
        own = set(params_of(self.carriers))
        others = [b for b in Block.under_way.values() if b is not self and b._backward == backward]
        return [each for each in others if not own.isdisjoint(params_of(each.carriers))]

    @torch.no_grad()
    def _let_others_go_on(self) -> None:
        """Puts away what has arrived of this loss, where that has interrupted blocks inside."""
        inside, self._inside = self._inside, []
        for block in inside:
            block._waits_for = None
            for grads, _ in self._interrupted.values():
                for param in grads.keys() & params_of(block.carriers):
                    if (new := param.grad) is not None:
                        before, param.grad = grads[param], None
                        grads[param] = kept(new) if before is None else added(before, new)
        for block in inside:
            block.go_on(self)

    def _after_backward(self) -> None:
        if self._inside:
            self._let_others_go_on()
        is_apart = any(each.earlier for each in self.carriers)
        # After torch.autograd.grad a script puts gradients where it finds none.
        if is_apart and any(param.grad is not None for param in params_of(self.carriers)):
            self.show()

    def show(self) -> None:
        """Lets a script clear gradients: what is aside of a parameter goes with its gradient."""
        if self._interrupted:
            return  # the gradients that a script sees are another block's
        known = [each for each in self.carriers if each.earlier]
        for each in known:
            each.show_zeros()
        if known:
            self._is_apart = True
            _C.note_gradients(params_of(self.carriers), self.scale)

    def restore(self) -> None:
        """Gives parameters the gradients that they had before the losses."""
        for found in reversed(self._found):
            # The first carrier has found what parameters had.
            for each, own in reversed([*zip(self.carriers, found, strict=True)]):
                each.restore(own)

    def begin(self, own: list[Pairs]) -> list[list[Found]]:
        """Sets true gradients aside, and gives those of delayed losses this scale.

        own: pairs of each carrier.
        """
        scales = _C.gradient_scales([param for pairs in own for param, _ in pairs])
        found = []
        for carrier, pairs in zip(self.carriers, own, strict=True):
            found.append(carrier.set_aside(pairs, scales, self.delays))
        factors: dict[float, list[Tensor]] = {}
        for param, before in scales.items():
            if before is not None:
                factors.setdefault(self.scale / before, []).append(param)
        for factor, params in factors.items():
            gradients.unscale_gradients(params, [], factor)
            _C.note_gradients(params, self.scale)
        return found

    def interrupt(self, by: "Block", params: set[Tensor]) -> Gradients:
        """Puts away what this loss has of these gradients, while another one goes backward.

        Returns it, by the parameters which both have in common.
        """
        own = self._common(params)
        if not any(own):
            return {}
        self.prepare()
        grads = {param: param.grad for pairs in own for param, _ in pairs}
        for param, grad in grads.items():
            grads[param] = None if grad is None else kept(grad)
            param.grad = None
        each = zip(self.carriers, own, strict=True)
        earlier = [
            {target: x for _, target in pairs if (x := carrier.earlier.pop(target, None))}
            for carrier, pairs in each
        ]
        self._interrupted[by] = grads, earlier
        return grads

    @torch.no_grad()
    def go_on(self, after: "Block") -> None:
        """Takes back an `interrupt`, and adds what that block has left."""
        grads, earlier = self._interrupted.pop(after)
        for carrier, known in zip(self.carriers, earlier, strict=True):
            for target, each in known.items():
                left = carrier.earlier.get(target)  # by a delayed loss inside of the other block
                own = each if left is None else each._replace(true=added(each.true, left.true))
                carrier.earlier[target] = own
        self.begin(self._common(grads))
        for param, grad in grads.items():
            if grad is not None:
                param.grad = grad if param.grad is None else added(grad, param.grad)

    def _common(self, params: Container[Tensor]) -> list[Pairs]:
        each = (carrier.pairs() for carrier in self.carriers)
        return [[pair for pair in pairs if pair[0] in params] for pairs in each]


@contextmanager
def scaled_backward(
    carriers: Sequence[Carrier],
    scale: float,
    delays: bool = False,
    scaled: Tensor | None = None,
    of_others: Tensor | None = None,
) -> Iterator[Block]:
    """A block for a backward pass at this scale, and for `collect` unless it is delayed.

    scaled: the loss that goes backward, if a script runs in the block, which may clear gradients
    before and after; call the block's `prepare` at its end. of_others: the same loss before it is
    scaled, if a block around this one scales it, too.

    True gradients of earlier losses are set aside, and `collect` adds them. Gradients of delayed
    losses stay where they are, and follow where this loss has another scale. What a block around
    this one has of the same parameters is put away meanwhile.
    """
    block = Block(carriers, scale, delays)
    hooks: list[Any] = []
    try:
        if scaled is not None and scaled.requires_grad:
            hooks.append(scaled.register_hook(block.before_backward))  # type: ignore[no-untyped-call]
            if of_others is not None:
                before: Any = partial(block.before_backward, is_own=False)
                hooks.append(of_others.register_hook(before))  # type: ignore[no-untyped-call]
        try:
            Block.under_way[id(block)] = block
            if not hooks:
                block.prepare()
            yield block
        except BaseException:
            block.restore()
            raise
        finally:
            Block.under_way.pop(id(block), None)
        if delays:
            _C.note_gradients(params_of(carriers), scale)
        for each in carriers:
            each.put_back()
    finally:
        Block.under_way.pop(id(block), None)  # an interrupt may have come before the other line
        for hook in hooks:
            hook.remove()
        for interrupted in block.outside:
            interrupted.go_on(block)
        for interrupted in block.outside:
            interrupted.show()


def are_gone(params: Iterable[Tensor], groups: Sequence[dict[str, Any]]) -> bool:
    """Whether no parameter has a gradient other than 0, also none that a loss has set aside.

    On no process either of the process_groups of these param_groups.
    """
    given = list(params)
    blocks = [*Block.under_way.values()]
    busy = any(not set(params_of(block.carriers)).isdisjoint(given) for block in blocks)
    return not reduction.on_any_process(groups, busy or bool(ledger.nonzero(given)))
