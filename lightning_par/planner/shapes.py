"""What is trained, on what layout, by which implementation: three checked, immutable values.

Shapes: D model dim, F feed-forward dim, H head dim, T tokens of a sequence, V vocabulary, E
experts, L layers.
"""

from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from typing import Any, get_args, Literal

from lightning_par.engine.pipeline.schedules import place_stages, SCHEDULES, splits_backward
from lightning_par.errors import ConfigurationError, either, MeshError, raise_problems
from lightning_par.sizes import ParallelSizes

__all__ = ["Implementation", "Layout", "Recompute", "TransformerShape"]

Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True, kw_only=True)
class TransformerShape:
    """Sizes of a transformer of equal blocks.

    Attributes:
        layers: L.
        model_dim: D.
        heads: Number of query heads.
        kv_heads: Number of key/value heads; 0: `heads`.
        head_dim: H; 0: D / heads.
        ff_dim: F, of one expert; 0: 4 D.
        vocab: V, rows of the embedding and of the head.
        length: T.
        gated: Whether the MLP has a gate (SwiGLU): three matrices instead of two.
        tied: Whether the head shares the embedding's weight.
        causal: Whether attention skips later tokens.
        experts: E; 1: dense.
        experts_per_token: Experts that a token passes.
        shared_experts: Experts that every token passes, besides.
        expert_capacity: Tokens of a sequence that an expert takes at most; 0: all.
        dropout: Whether dropout masks are kept.
        chunked_loss: Whether logits are there in chunks of tokens only.
    """

    layers: int
    model_dim: int
    heads: int
    length: int
    vocab: int
    kv_heads: int = 0
    head_dim: int = 0
    ff_dim: int = 0
    gated: bool = False
    tied: bool = True
    causal: bool = True
    experts: int = 1
    experts_per_token: int = 1
    shared_experts: int = 0
    expert_capacity: int = 0
    dropout: bool = False
    chunked_loss: bool = False

    def __post_init__(self) -> None:
        counts = ("layers", "model_dim", "heads", "length", "vocab", "experts", "experts_per_token")
        raise_problems(
            ConfigurationError,
            "LP902",
            [f"{n}={getattr(self, n)} must be 1 or more." for n in counts if getattr(self, n) < 1],
        )
        defaults = {
            "kv_heads": self.heads,
            "head_dim": self.model_dim // self.heads,
            "ff_dim": 4 * self.model_dim,
        }
        for name, value in defaults.items():
            if getattr(self, name) == 0:
                object.__setattr__(self, name, value)  # how a frozen dataclass sets its own fields

    @property
    def attention_weights(self) -> int:
        """Weights of the four projections of a block."""
        # Query and output have `heads` heads, key and value `kv_heads`: 2 D H of each pair.
        return 2 * self.model_dim * self.head_dim * (self.heads + self.kv_heads)

    @property
    def expert_weights(self) -> int:
        """Weights of one MLP."""
        return (3 if self.gated else 2) * self.model_dim * self.ff_dim

    @property
    def table_weights(self) -> int:
        """Weights of the embedding, V D; the head has as many."""
        return self.vocab * self.model_dim

    def divides_experts(self, expert: int, tensor: int) -> bool:
        """Tell whether a degree of the expert axis is possible beside a tensor-parallel degree."""
        return self.experts % expert == 0

    def divides(self, tensor: int) -> bool:
        """Tell whether a tensor-parallel degree is possible."""
        return self.heads % tensor == 0 and self.kv_heads % tensor == 0

    def block_weights(self, tensor: int = 1, expert: float = 1, *, trained: bool = False) -> float:
        """Return the weights of a block that one rank of these axes holds.

        Args:
            tensor: Degree of the tensor axis.
            expert: Degree of the expert axis; infinite: without experts.
            trained: Count those that are trained, which here are all.
        """
        # Shared experts are on every rank of the expert axis.
        experts = self.experts / expert + self.shared_experts
        return (self.attention_weights + experts * self.expert_weights) / tensor

    def span_weights(
        self, start: int, end: int, tensor: int = 1, expert: float = 1, *, trained: bool = False
    ) -> float:
        """Return the weights of the blocks `start` to `end` - 1 that one rank holds."""
        return (end - start) * self.block_weights(tensor, expert, trained=trained)

    def end_weights(self, tensor: int, *, first: bool, last: bool, trained: bool = False) -> float:
        """Return the weights before and after the blocks that one rank holds.

        Args:
            tensor: Degree of the tensor axis.
            first: Whether the rank has what is before the blocks.
            last: Whether it has what is after them.
            trained: Count those that are trained.
        """
        # Tied: one table for both ends, if this rank has any of them.
        tables = (first or last) if self.tied else first + last
        return tables * self.table_weights / tensor

    def shared_weights(self, tensor: int = 1) -> float:
        """Return the trained weights that are both before and after the blocks, on one rank."""
        return self.table_weights / tensor if self.tied else 0.0

    @property
    def tensor_sums(self) -> float:
        """Sums of hidden states over the tensor axis in a block's forward."""
        return 2.0

    @property
    def parameters(self) -> int:
        """Weights of the model; norms and biases, under 0.1 %, are left out."""
        block = self.attention_weights + self.expert_weights * (self.experts + self.shared_experts)
        return self.layers * block + self.table_weights * (1 if self.tied else 2)

    def flops(self, samples: float) -> float:
        """Return the model FLOPs of a step, without recomputation and with all T x T scores.

        Args:
            samples: Sequences of the step.

        **Source**: Chowdhery et al., PaLM (2204.02311), appendix B.
        """
        # Experts that a token passes, not those that there are.
        used = self.experts_per_token + self.shared_experts
        block = self.attention_weights + used * self.expert_weights
        scores = 12 * self.layers * self.heads * self.head_dim * self.length
        # 6 = 2 FLOPs of a multiply-add, for forward and two products of the backward. The head is
        # a product, the embedding a look-up: one table.
        return samples * self.length * (6 * (self.layers * block + self.table_weights) + scores)


@lru_cache(maxsize=1 << 12)
def _owners(schedule: str, ranks: int, stages_per_rank: int) -> tuple[int, ...]:
    return place_stages(schedule, ranks, stages_per_rank)


@lru_cache(maxsize=1 << 12)
def _splits_backward(schedule: str, ranks: int) -> bool:
    return ranks > 1 and splits_backward(schedule, ranks)


@lru_cache(maxsize=1 << 12)
def _split(layers: int, stages: int) -> tuple[int, ...]:
    few, more = divmod(layers, stages)
    # From the middle outwards: the first and the last stage have something to do besides.
    order = sorted(range(stages), key=lambda s: (abs(2 * s - stages + 0.5), s))
    longer = set(order[:more])
    return tuple(few + (s in longer) for s in range(stages))


@lru_cache(maxsize=1 << 12)
def _spans(
    blocks: tuple[int, ...], owners: tuple[int, ...], ranks: int
) -> tuple[tuple[tuple[int, int], ...], ...]:
    found: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    ends = tuple(accumulate(blocks))
    for start, end, owner in zip((0, *ends), ends, owners, strict=False):
        found[owner].append((start, end))
    return tuple(map(tuple, found))


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a step is laid out over the devices.

    Attributes:
        sizes: The mesh.
        micro_batch: Samples of a micro-batch.
        microbatches: Micro-batches of a step on each replica.
        zero_stage: What replicas shard, 0 to 3.
        schedule: A key of `engine.pipeline.schedules.SCHEDULES`.
        virtual: Stages of a rank, where the schedule lets one choose them.
        recompute: What blocks compute again in the backward.
        sequence_parallel: Whether the parts between tensor-parallel layers are sharded, too.
        offload: Whether the optimizer and its states are on the host.
        expert_max_rows: Rows of every part that ranks send to experts of each other, by padding;
            None: as many as tokens choose.
        blocks: Blocks of each stage; (): as equal as possible.
    """

    sizes: ParallelSizes = field(default_factory=ParallelSizes)
    micro_batch: int = 1
    microbatches: int = 1
    zero_stage: int = 1
    schedule: str = "1f1b"
    virtual: int = 1
    recompute: Recompute = "none"
    sequence_parallel: bool = True
    offload: bool = False
    expert_max_rows: int | None = None
    blocks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.recompute not in get_args(Recompute):
            allowed = either([repr(v) for v in get_args(Recompute)])
            raise ConfigurationError("LP902", f"recompute={self.recompute!r} must be {allowed}.")
        if self.blocks and len(self.blocks) != self.stages:
            raise MeshError(
                "LP107",
                f"blocks={self.blocks} lists the blocks of {len(self.blocks)} stages, but "
                f"{self.sizes.pipeline} pipeline ranks with {self.stages_per_rank} stages each "
                f"have {self.stages} stages. Give {self.stages} numbers.",
            )

    @property
    def stages_per_rank(self) -> int:
        """Stages that a pipeline rank holds."""
        if self.sizes.pipeline == 1:
            return 1
        row = SCHEDULES.get(self.schedule)
        # A schedule from a file places its own stages; one on each rank is assumed.
        if row is None:
            return 1
        return max(row.stages_per_rank, self.virtual) if row.chosen else row.stages_per_rank

    @property
    def in_rounds(self) -> bool:
        """Whether the stages of a rank take turns with rounds of micro-batches, as interleaved."""
        return self.schedule in SCHEDULES and SCHEDULES[self.schedule].chosen

    @property
    def stages(self) -> int:
        """Stages of the whole pipeline."""
        return self.sizes.pipeline * self.stages_per_rank

    @property
    def owners(self) -> tuple[int, ...]:
        """The pipeline rank of every stage."""
        return _owners(self.schedule, self.sizes.pipeline, self.stages_per_rank)

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of weights are computed later than those of inputs."""
        return _splits_backward(self.schedule, self.sizes.pipeline)

    @property
    def samples(self) -> int:
        """Samples of a step, of all replicas."""
        return self.sizes.data * self.micro_batch * self.microbatches

    @classmethod
    def from_options(
        cls,
        options: Any,
        sizes: ParallelSizes,
        batch: int,
        *,
        accumulated: int = 1,
        recompute: Recompute = "none",
    ) -> "Layout":
        """Return the layout that options of a strategy ask for.

        Args:
            options: `MeshOptions`.
            sizes: The mesh.
            batch: Samples of a replica's batch, which only a pipeline cuts.
            accumulated: Batches of an optimizer step.
            recompute: What blocks compute again.
        """
        pieces, virtual = 1, options.virtual_pipeline_size
        if sizes.pipeline > 1:
            # No more micro-batches than samples, as `PipelinedSteps.cut` makes.
            pieces = min(options.microbatches(sizes.pipeline), batch)
        return cls(
            sizes=sizes,
            micro_batch=-(-batch // pieces),
            microbatches=pieces * accumulated,
            zero_stage=options.zero_stage,
            schedule=options.schedule,
            virtual=2 if virtual == "auto" else virtual,
            recompute=recompute,
            sequence_parallel=options.sequence_parallel,
            offload=options.offload_options is not None,
            expert_max_rows=options.expert_max_rows,
            blocks=tuple(options.stage_blocks or ()),
        )

    def options(self) -> dict[str, Any]:
        """Return the options of `Hybrid3DStrategy` that make the layout."""
        sizes = self.sizes
        chosen: dict[str, Any] = {
            "tensor_parallel_size": sizes.tensor,
            "pipeline_parallel_size": sizes.pipeline,
            "context_parallel_size": sizes.context,
            "data_parallel_size": sizes.data,
            "zero_stage": self.zero_stage,
        }
        if sizes.expert > 1:
            chosen["expert_parallel_size"] = sizes.expert
            if self.expert_max_rows is not None:
                chosen["expert_max_rows"] = self.expert_max_rows
        # At stage 0 all replicas are whole copies, which the option's "auto" gives.
        if sizes.data_replicate > 1 and self.zero_stage > 0:
            chosen["data_parallel_replicate_size"] = sizes.data_replicate
        if not self.sequence_parallel:
            chosen["sequence_parallel"] = False
        if sizes.pipeline > 1:
            chosen |= {"schedule": self.schedule, "num_microbatches": self.microbatches}
            if self.in_rounds:
                chosen["virtual_pipeline_size"] = self.stages_per_rank
            if self.blocks:
                chosen["stage_blocks"] = list(self.blocks)
        if self.offload:
            chosen["offload_options"] = {"offload_optimizer": True}
        return chosen

    def expert_rows(self, shape: TransformerShape) -> float:
        """Return the rows that a rank sends to experts, and gets, in a micro-batch, those that stay
        included: padded, or of even routing.

        Args:
            shape: The model.
        """
        chosen = self.micro_batch * shape.length / self.sizes.context * shape.experts_per_token
        return self.sizes.exchanged_rows(chosen, self.expert_max_rows)

    def holds_choices(self, shape: TransformerShape) -> bool:
        """Tell whether parts of `expert_max_rows` hold whatever tokens of a micro-batch choose.

        Args:
            shape: The model.
        """
        if self.expert_max_rows is None or self.sizes.expert == 1:
            return True
        # Of a micro-batch; a token sends at most one row to each expert of a rank.
        tokens, here = self.micro_batch * shape.length, shape.experts // self.sizes.expert
        most = tokens // self.sizes.context * min(shape.experts_per_token, here)
        if shape.expert_capacity:
            most = min(most, self.micro_batch * here * shape.expert_capacity)
        return most <= self.expert_max_rows

    def spans(self, layers: int) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Return, for every pipeline rank, first and one-past-last block of its stages.

        Args:
            layers: L.
        """
        return _spans(self.split(layers), self.owners, self.sizes.pipeline)

    def split(self, layers: int) -> tuple[int, ...]:
        """Return the number of blocks of each stage; the outer stages, with table and head, get
        fewer.

        Args:
            layers: L.
        """
        if self.blocks:
            return self.blocks
        return _split(layers, self.stages)

    def __str__(self) -> str:
        words = [str(self.sizes)]
        if self.sizes.expert > 1:
            words.append(f"ep {self.sizes.expert}")
        words.append(f"zero {self.zero_stage}")
        if self.sizes.pipeline > 1:
            count = f" x{self.stages_per_rank}" if self.in_rounds else ""
            words.append(self.schedule + count)
        words += [f"{self.microbatches} x {self.micro_batch}", f"recompute {self.recompute}"]
        if self.sizes.tensor > 1 and not self.sequence_parallel:
            words.append("no sequence parallelism")
        return ", ".join([*words, *(["offload"] if self.offload else [])])


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """What the training code does that changes the cost, beside the layout.

    Attributes:
        fused_attention: A kernel that never writes the T x T scores.
        attention_rates: Speed of that kernel, forward and backward, relative to a large product.
            FlashAttention-2 (2307.08691) reaches 0.6 to 0.7 of the peak of an A100, and 0.35 to
            0.4 of that of an H100, where FlashAttention-3 (2407.08608) reaches 0.6 to 0.75.
        fused_elementwise: Share of the traffic of element-wise work that remains; 1: none is fused.
        fp8: Matrix products of blocks in 8 bits.
        async_tensor: The tensor-parallel collectives of the backward run beside the products that
            give the gradients of weights, as in Megatron-LM.
        fused_tensor: Share of tensor-parallel collectives that runs beside the very product that
            makes or takes their data, cut into parts.
        fused_accumulation: The products that give the gradients of weights add to those of earlier
            micro-batches, as Megatron-LM's kernel does; else a pass over memory does it.
        async_p2p: Stages send without waiting.
        sharded_p2p: Tensor-parallel ranks send a part each, also without sequence parallelism.
        overlap_data: Gradients are sent during the last backward.
        fsdp: Replicas share states as this package's do, by FSDP2: at stages 1 and 2, too, weights
            are gathered beside their shards; accumulated batches, and schedules that compute
            gradients of weights later, sum whole gradients, which are reduced once; context ranks
            share no states. False: as Megatron-LM and DeepSpeed.
        gathers_again: What sequence parallelism gathers is gathered again in the backward, as in
            Megatron-LM, and not kept.
        activation_bytes: Bytes of an element of products and hidden states.
        autocast: Products alone are in 16 bits: what enters blocks and norms is in float32.
        weight_bytes, gradient_bytes, state_bytes: Bytes held per parameter.
        reduce_bytes: Bytes of a gradient that replicas send.
        gather_bytes: Bytes of a weight that replicas gather.
        step_traffic: Bytes that the optimizer reads and writes per parameter.
        logit_bytes: Bytes per logit at the peak of the loss: 16 bits, float32, its logarithm, and
            the gradients of the two in float32 and 16 bits.
        selective_share: Share of a block's forward that "selective" recomputes, where attention is
            fused; else it is attention that it recomputes.
        kernels: Kernels that the host starts for a block's forward, and for its backward.
    """

    fused_attention: bool = True
    attention_rates: tuple[float, float] = (0.62, 0.50)
    fused_elementwise: float = 1.0
    fp8: bool = False
    async_tensor: bool = False
    fused_tensor: float = 0.0
    fused_accumulation: bool = False
    async_p2p: bool = True
    sharded_p2p: bool = False
    overlap_data: bool = True
    fsdp: bool = True
    gathers_again: bool = False
    activation_bytes: float = 2.0
    autocast: bool = False
    weight_bytes: float = 2.0
    gradient_bytes: float = 4.0
    state_bytes: float = 12.0
    reduce_bytes: float = 4.0
    gather_bytes: float = 2.0
    step_traffic: float = 40.0
    logit_bytes: float = 16.0
    selective_share: float = 0.1
    kernels: tuple[int, int] = (22, 40)

    @property
    def stream_bytes(self) -> float:
        """Bytes of an element of what enters blocks and norms, and travels between stages."""
        return max(4.0, self.activation_bytes) if self.autocast else self.activation_bytes

    def expert_bytes(self, shape: TransformerShape, layout: Layout) -> float:
        """Return the bytes of a rank's rows in an all-to-all of a micro-batch to experts, or back;
        tensor ranks each send whole rows.
        """
        return self.activation_bytes * layout.expert_rows(shape) * shape.model_dim

    def shards(self, layout: Layout) -> int:
        """Return how many ranks share the states of a weight."""
        # FSDP shards over dp_shard; others over the context ranks as well, which hold the same
        # weights.
        return layout.sizes.data_shard * (1 if self.fsdp else layout.sizes.context)

    def expert_shards(self, layout: Layout) -> int:
        """Return how many ranks share the states of an expert."""
        sizes, shards = layout.sizes, self.shards(layout)
        if sizes.expert == 1 or shards == 1:
            return shards
        # Those that hold the same experts, whichever tokens of a sequence they have.
        return max(1, sizes.data_shard * sizes.context // sizes.expert)

    def reduces_each(self, layout: Layout) -> bool:
        """Return whether the gradients of every micro-batch are reduced."""
        if layout.zero_stage < 2 or not self.fsdp:
            return layout.zero_stage >= 2
        # Accumulated batches of a run without a pipeline sum gradients on the device.
        if layout.sizes.pipeline == 1:
            return layout.microbatches == 1
        return not layout.splits_backward  # else those of weights come later, together
