// The formulas of lightning_par/planner (memory.py, shapes.py, step_time.py: traffic) for the
// calculator of which_layout.md. tests/unit/planner/test_calculator.py holds them equal to Python.
// D, F, H, T, V and other names as there; sizes in bytes. Only memory decides: nothing is timed.
"use strict";

const RECOMPUTE = ["none", "selective", "full"];
const divisors = (n) => Array.from({ length: n }, (_, i) => i + 1).filter((d) => n % d === 0);
const sum = (values) => Object.values(values).reduce((a, b) => a + b, 0);
const shares = (s) => s.data_replicate * s.data_shard * s.context;

// A model's shape with what is 0 filled in, as TransformerShape does.
function complete(m) {
  return {
    ...m,
    kv_heads: m.kv_heads || m.heads,
    head_dim: m.head_dim || Math.floor(m.model_dim / m.heads),
    ff_dim: m.ff_dim || 4 * m.model_dim,
  };
}

const attentionWeights = (m) => 2 * m.model_dim * m.head_dim * (m.heads + m.kv_heads);
const expertWeights = (m) => (m.gated ? 3 : 2) * m.model_dim * m.ff_dim;

function blockWeights(m, tensor, expert) {
  return (attentionWeights(m) + (m.experts / expert + m.shared_experts) * expertWeights(m)) / tensor;
}

// Weights of a block, of which each rank has a share of the states: those of experts are shared by
// the ranks that hold the same ones, whichever tokens of a sequence they have.
function shardOfBlock(m, s) {
  const shard = blockWeights(m, s.tensor, s.expert) / s.data_shard;
  if (s.expert === 1 || s.data_shard === 1) return shard;
  const others = blockWeights(m, s.tensor, Infinity);
  const ranks = Math.max(1, Math.floor((s.data_shard * s.context) / s.expert));
  return others / s.data_shard + (blockWeights(m, s.tensor, s.expert) - others) / ranks;
}

function parameters(m) {
  return m.layers * blockWeights(m, 1, 1) + m.vocab * m.model_dim * (m.tied ? 1 : 2);
}

// Blocks of each stage: the outer stages, with table and head, get fewer.
function split(layers, stages) {
  const few = Math.floor(layers / stages);
  const order = Array.from({ length: stages }, (_, s) => s);
  const away = (s) => Math.abs(2 * s - stages + 0.5);
  order.sort((a, b) => away(a) - away(b) || a - b);
  const longer = new Set(order.slice(0, layers % stages));
  return Array.from({ length: stages }, (_, s) => few + (longer.has(s) ? 1 : 0));
}

const tokens = (m, l) => (l.micro_batch * m.length) / l.sizes.context;

// Bytes of an element of what enters blocks and norms, and travels between stages.
const streamBytes = (code) =>
  code.autocast ? Math.max(4, code.activation_bytes) : code.activation_bytes;

// Bytes of a rank's rows in an all-to-all of a micro-batch to experts, or back.
const expertBytes = (m, l, code) =>
  code.activation_bytes * tokens(m, l) * m.experts_per_token * m.model_dim;

// Bytes that a block keeps of one micro-batch from its forward to its backward.
function blockActivations(m, l, code, recompute) {
  const t = l.sizes.tensor;
  const n = tokens(m, l);
  const between = (n * m.model_dim) / (l.sequence_parallel ? t : 1);
  const wider = code.activation_bytes / 2; // counted for 16 bits
  const entered = (code.autocast ? 4 : 2) * between;
  if (recompute === "full") return wider * entered;
  const used = m.experts_per_token + m.shared_experts;
  const heads = 2 * (2 * m.heads + 2 * m.kv_heads) * m.head_dim;
  const selective = recompute === "selective";
  const whole = n * m.model_dim; // gathered inputs, and sums before they are scattered
  if (selective && code.fused_attention) {
    const kept = 2 * used * m.ff_dim * (m.gated ? 2 : 1);
    return wider * (entered + 4 * whole + (n / t) * (heads + kept));
  }
  const mlp = used * m.ff_dim * (m.gated ? 8 : 4);
  // Rows sorted by expert, their outputs, and these weighted.
  const sorted = m.experts > 1 ? 6 * m.experts_per_token * n * m.model_dim : 0;
  const written = !(code.fused_attention || selective);
  const rows = ((2 + (m.dropout ? 3 : 0)) * l.micro_batch * m.heads) / t;
  const scores = written ? (rows * m.length ** 2) / l.sizes.context : 0;
  const outside = 2 * entered + (m.dropout ? 2 : 0) * between + 4 * whole;
  return wider * (outside + (n / t) * (heads + mlp) + sorted + scores);
}

// Whether gradients are divided over the replicas when most is needed.
function shardsGradients(l) {
  return l.microbatches === 1 || (l.zero_stage >= 2 && l.sizes.pipeline > 1);
}

function states(l, code, held, shard) {
  const over = l.sizes.data_shard;
  const zero = l.zero_stage;
  const gathered = over > 1 && zero < 3 ? code.gather_bytes * held : 0;
  const castsAgain = l.sizes.pipeline > 1 || (zero === 3 && over > 1);
  // The 16-bit copies that products have made wait for the backward.
  const casts = code.autocast && l.recompute === "none" && !castsAgain;
  // Under a pipeline those of the last step stay until the new ones are computed.
  const gradients = (shardsGradients(l) ? shard : held) + (l.sizes.pipeline > 1 ? shard : 0);
  return {
    weights:
      code.weight_bytes * (over > 1 || zero === 3 ? shard : held) +
      gathered +
      (casts ? code.activation_bytes * held : 0),
    gradients: code.gradient_bytes * gradients,
    states: l.offload ? 0 : code.state_bytes * (zero >= 1 ? shard : held),
  };
}

function buffers(m, l, code, weights) {
  const s = l.sizes;
  const parts = l.sequence_parallel || code.sharded_p2p ? s.tensor : 1;
  const hidden = (streamBytes(code) * tokens(m, l) * m.model_dim) / parts;
  const exchanged = s.expert > 1 ? 2 * expertBytes(m, l, code) : 0;
  const messages = (s.pipeline > 1 ? 4 * hidden : 0) + exchanged;
  if (shares(s) === 1) return messages;
  const gathered = l.zero_stage === 3 ? 2 * code.gather_bytes * weights : 0;
  return messages + gathered + code.reduce_bytes * weights;
}

// Bytes of every pipeline rank by kind under the schedule 1f1b, and those of the host.
function memory(m, l, code) {
  const s = l.sizes;
  const weights = blockWeights(m, s.tensor, s.expert);
  const kept = blockActivations(m, l, code, l.recompute);
  const whole = blockActivations(m, l, code, "none");
  const moment = l.recompute === "none" ? 0 : whole - kept;
  // At stage 3 what is around the blocks stays gathered.
  const around = l.zero_stage === 3 && s.data_shard > 1 ? code.gather_bytes : 0;
  const logits = (code.logit_bytes * tokens(m, l) * m.vocab) / s.tensor;
  let mostShard = 0;
  const ranks = split(m.layers, s.pipeline).map((count, r) => {
    const first = r === 0;
    const last = r === s.pipeline - 1;
    const ends = m.tied ? Number(first || last) : Number(first) + Number(last);
    const tables = (ends * m.vocab * m.model_dim) / s.tensor;
    const held = count * weights + tables;
    const shard = count * shardOfBlock(m, s) + tables / s.data_shard;
    mostShard = Math.max(mostShard, shard);
    return {
      ...states(l, code, held, shard),
      activations: kept * count * Math.min(l.microbatches, s.pipeline - r),
      moment: Math.max(moment, last ? logits : 0),
      buffers: buffers(m, l, code, weights) + around * (held - count * weights),
    };
  });
  const most = Math.max(...ranks.map((r) => sum(r)));
  const at = ranks.findIndex((r) => sum(r) === most);
  // The states and a copy of the gradients.
  const host = l.offload ? mostShard * (code.state_bytes + code.reduce_bytes) : 0;
  return { ranks, peak: most, peak_rank: at, host };
}

// Bytes that a rank sends in a step, by axis.
function traffic(m, l, code) {
  const s = l.sizes;
  const stages = split(m.layers, s.pipeline);
  const blocks = Math.max(...stages);
  const passes = l.microbatches * blocks;
  const again = l.recompute === "full" ? 1 : 0;
  const hidden = streamBytes(code) * tokens(m, l) * m.model_dim;
  const ofTokens = passes * (2 + again) * hidden;
  const keys = (2 * code.activation_bytes * tokens(m, l) * m.kv_heads * m.head_dim) / s.tensor;
  const parts = l.sequence_parallel || code.sharded_p2p ? s.tensor : 1;
  const k = l.microbatches;
  const reductions = l.zero_stage >= 2 && s.pipeline > 1 ? k : 1;
  const gathers = l.zero_stage === 3 ? 2 * k : 1;
  const tables = ((m.vocab * m.model_dim) / s.tensor) * (s.pipeline === 1 && !m.tied ? 2 : 1);
  const over = s.data_shard;
  const divided = s.expert > 1 && over > 1;
  // Experts are shared by those that hold the same ones, if an expert degree divides them.
  const others = blocks * blockWeights(m, s.tensor, divided ? Infinity : s.expert) + tables;
  const experts = blocks * blockWeights(m, s.tensor, s.expert) + tables - others;
  const alike = divided ? Math.max(1, Math.floor((over * s.context) / s.expert)) : 1;
  const sent = (ranks, size) => ((ranks - 1) / ranks) * size;
  const width = reductions * code.reduce_bytes + gathers * code.gather_bytes;
  const copied = (2 * code.reduce_bytes * others) / over;
  return {
    pp: s.pipeline > 1 ? (2 * k * hidden) / parts : 0,
    dp_replicate: sent(s.data_replicate, copied + (2 * code.reduce_bytes * experts) / alike),
    dp_shard: sent(over, width * others) + sent(alike, width * experts),
    cp: (s.context - 1) * passes * (3 + again) * keys + sent(s.context, copied),
    ep: sent(s.expert, 2 * passes * (2 + again) * expertBytes(m, l, code)),
    // Half of it enters divided layers, and half leaves them.
    tp: sent(s.tensor, 2 * ofTokens * (1 + code.activation_bytes / streamBytes(code))),
  };
}

// Every plain layout, as LayoutSpace yields them.
function* layouts(m, machine, limits) {
  const { devices, node, samples, offload } = machine;
  for (const tensor of divisors(node)) {
    if (devices % tensor || m.heads % tensor || m.kv_heads % tensor) continue;
    for (const pipeline of divisors(devices / tensor)) {
      if (pipeline > m.layers) break;
      const left = devices / tensor / pipeline;
      for (const context of divisors(left)) {
        const short = Math.floor(m.length / context) < limits.shortest_context;
        if (context > 1 && short) break;
        if (context > 1 && m.length % (2 * context)) continue;
        const data = left / context;
        if (samples % data) continue;
        for (const [zero, copies] of replicas(data, tensor * context, node, limits)) {
          const inner = { pipeline, context, tensor };
          yield* batches(m, { ...inner, data, zero, copies, samples, offload }, limits);
        }
      }
    }
  }
}

// ZeRO stages, each with the number of whole copies.
function* replicas(data, inner, node, limits) {
  if (data === 1) {
    yield [1, 1];
    return;
  }
  for (const zero of limits.zero_stages) {
    if (zero < 3 || data * inner <= limits.most_gathering_nodes * node) yield [zero, 1];
    const shard = node % inner ? 1 : node / inner;
    if (zero >= 2 && shard > 1 && shard < data && data % shard === 0) yield [zero, data / shard];
  }
}

function* batches(m, one, limits) {
  const shard = one.data / one.copies;
  const experts = m.experts === 1 ? [1] : divisors(shard * one.context);
  const ofReplica = one.samples / one.data;
  for (const expert of experts.filter((e) => m.experts % e === 0)) {
    for (const micro of divisors(ofReplica).filter((d) => d <= limits.largest_micro_batch)) {
      for (const recompute of RECOMPUTE) {
        yield {
          sizes: {
            pipeline: one.pipeline,
            data_replicate: one.copies,
            data_shard: shard,
            context: one.context,
            tensor: one.tensor,
            expert,
          },
          micro_batch: micro,
          microbatches: ofReplica / micro,
          zero_stage: one.zero,
          recompute,
          sequence_parallel: Math.floor(m.length / one.context) % one.tensor === 0,
          offload: one.offload,
        };
      }
    }
  }
}

// What the rule of lightning_par/planner/plain_layout.py compares, by the names that it has there.
const RESPECTS = {
  divided: (l) => l.sizes.tensor * l.sizes.pipeline * l.sizes.context,
  recompute: (l) => RECOMPUTE.indexOf(l.recompute),
  pipeline: (l) => l.sizes.pipeline,
  context: (l) => l.sizes.context,
  expert: (l) => l.sizes.expert,
  zero_stage: (l) => l.zero_stage,
  data_replicate: (l) => l.sizes.data_replicate,
  micro_batch: (l) => l.micro_batch,
};

// The order of two layouts by the rule: below 0 if the first comes first.
function order(rule, a, b) {
  for (const [name, end] of rule) {
    const difference = RESPECTS[name](a) - RESPECTS[name](b);
    if (difference) return end === "least" ? difference : -difference;
  }
  return 0;
}

// The plain answer: of the layouts that fit, the first by the rule; and the one that needs least memory.
function choose(m, machine, code, limits, rule) {
  let [considered, fitting, best, least] = [0, 0, null, null];
  for (const layout of layouts(m, machine, limits)) {
    considered += 1;
    const held = memory(m, layout, code);
    if (!least || held.peak < least.held.peak) least = { layout, held };
    if (held.peak > limits.margin * machine.memory) continue;
    fitting += 1;
    if (!best || order(rule, layout, best.layout) < 0) best = { layout, held };
  }
  return { best, least, considered, fitting };
}

// A layout in words, as Layout.__str__ says it.
function words(l) {
  const s = l.sizes;
  const axes = [
    ["pp", s.pipeline],
    ["dp_replicate", s.data_replicate],
    ["dp_shard", s.data_shard],
    ["cp", s.context],
    ["tp", s.tensor],
  ];
  const sizes = axes.filter(([, size]) => size > 1).map(([axis, size]) => `${axis} ${size}`);
  const said = [sizes.join(" x ") || "1 device"];
  if (s.expert > 1) said.push(`ep ${s.expert}`);
  said.push(`zero ${l.zero_stage}`);
  if (s.pipeline > 1) said.push("1f1b");
  said.push(`${l.microbatches} x ${l.micro_batch}`, `recompute ${l.recompute}`);
  if (s.tensor > 1 && !l.sequence_parallel) said.push("no sequence parallelism");
  return said.concat(l.offload ? ["offload"] : []).join(", ");
}

// The arguments of Hybrid3DStrategy, as run_settings.py gives them.
function settings(l) {
  const s = l.sizes;
  const chosen = {
    tensor_parallel_size: s.tensor,
    pipeline_parallel_size: s.pipeline,
    context_parallel_size: s.context,
    data_parallel_size: s.data_replicate * s.data_shard,
    zero_stage: l.zero_stage,
  };
  if (s.expert > 1) chosen.expert_parallel_size = s.expert;
  if (s.data_replicate > 1) chosen.data_parallel_replicate_size = s.data_replicate;
  if (!l.sequence_parallel) chosen.sequence_parallel = false;
  if (s.pipeline > 1) Object.assign(chosen, { schedule: "1f1b", num_microbatches: l.microbatches });
  if (l.offload) chosen.offload_options = { offload_optimizer: true };
  return chosen;
}

// The YAML of a run, as apply_layout gives it.
function yaml(l, machine, precision) {
  const pipelined = l.sizes.pipeline > 1;
  const chosen = Object.entries(settings(l)).flatMap(([name, value]) =>
    typeof value === "object"
      ? [`      ${name}:`, ...Object.entries(value).map(([k, v]) => `        ${k}: ${v}`)]
      : [`      ${name}: ${value}`],
  );
  const lines = [
    "trainer:",
    "  accelerator: auto",
    `  num_nodes: ${machine.devices / machine.node}`,
    `  devices: ${machine.node}`,
    `  precision: ${precision}`,
    "  strategy:",
    "    class_path: lightning_par.Hybrid3DStrategy",
    "    init_args:",
    ...chosen,
    `  accumulate_grad_batches: ${pipelined ? 1 : l.microbatches}`,
  ];
  if (l.recompute !== "none") {
    lines.push(
      "  callbacks:",
      "  - class_path: lightning_par.callbacks.ActivationCheckpointing",
      "    init_args:",
      `      mode: ${l.recompute}`,
    );
  }
  const batch = l.micro_batch * (pipelined ? l.microbatches : 1);
  return [...lines, "data:", "  init_args:", `    batch_size: ${batch}`].join("\n") + "\n";
}

if (typeof module !== "undefined") {
  module.exports = { choose, complete, layouts, memory, parameters, settings, traffic, words, yaml };
}
