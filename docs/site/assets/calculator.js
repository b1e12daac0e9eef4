// The form of which_layout.md: reads the inputs, asks layouts.js, shows sizes, memory and YAML.
// The inputs are kept in the address of the page, so that a link to it shows the same.
"use strict";

const MIB = 2 ** 20;
const GIB = 2 ** 30;
// What the package calls the parts of the memory -> what it is.
const PARTS = { states: "optimizer states", moment: "while a block is computed" };
const MODEL_FIELDS = {
  layers: "blocks",
  model_dim: "model dim",
  heads: "heads",
  kv_heads: "key/value heads",
  ff_dim: "feed-forward dim",
  vocab: "vocabulary",
  length: "tokens of a sequence",
  experts: "experts",
  experts_per_token: "experts of a token",
};
// Name -> label, and the unit in which it is shown.
const MACHINE_FIELDS = {
  memory: ["memory of a device, GB", 1e9],
  node: ["devices of a node", 1],
};
const FIRST = { model: "gpt3-13b", device: "a100-80", precision: "bf16-mixed" };

function make(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

const gib = (bytes) =>
  bytes < GIB ? `${(bytes / MIB).toPrecision(3)} MiB` : `${(bytes / GIB).toFixed(1)} GiB`;

const options = (names, chosen) =>
  names.map((n) => make("option", n === chosen ? { selected: "" } : {}, n));

function field(label, input) {
  return make("label", {}, make("span", {}, label), input);
}

class Calculator {
  constructor(root, data) {
    this.data = data;
    this.inputs = {};
    const number = (name, label, value) => {
      this.inputs[name] = make("input", { type: "number", min: "0", step: "any", value });
      return field(label, this.inputs[name]);
    };
    const choice = (name, label, names) => {
      this.inputs[name] = make("select", {}, ...options(names, FIRST[name]));
      return field(label, this.inputs[name]);
    };
    const check = (name, label) => {
      this.inputs[name] = make("input", { type: "checkbox" });
      return field(label, this.inputs[name]);
    };
    const group = (title, ...fields) => make("fieldset", {}, make("legend", {}, title), ...fields);
    this.output = make("div", { class: "layout-result", "aria-live": "polite" });
    root.replaceChildren(
      make(
        "form",
        { class: "layout-form" },
        group(
          "Model",
          choice("model", "start from", Object.keys(data.models)),
          ...Object.entries(MODEL_FIELDS).map(([n, label]) => number(n, label, 0)),
          check("gated", "gated MLP (SwiGLU)"),
          check("tied", "head shares the embedding"),
        ),
        group(
          "Machine",
          choice("device", "start from", Object.keys(data.devices)),
          number("nodes", "nodes", 2),
          ...Object.entries(MACHINE_FIELDS).map(([n, [label]]) => number(n, label, 0)),
        ),
        group(
          "Step",
          number("samples", "sequences of a step", 256),
          choice("precision", "precision", Object.keys(data.code)),
          check("offload", "optimizer in CPU memory"),
        ),
      ),
      this.output,
    );
    this.inputs.model.addEventListener("change", () => this.fillModel());
    this.inputs.device.addEventListener("change", () => this.fillMachine());
    root.addEventListener("submit", (event) => event.preventDefault());
    root.addEventListener("input", () => {
      this.show();
      history.replaceState(null, "", `?${this.address()}${location.hash}`);
    });
    this.fillModel();
    this.fillMachine();
    this.restore(new URLSearchParams(location.search));
    this.show();
  }

  // The inputs as the part of an address behind "?".
  address() {
    const given = Object.entries(this.inputs).map(([name, input]) =>
      [name, input.type === "checkbox" ? Number(input.checked) : input.value]);
    return new URLSearchParams(given);
  }

  restore(given) {
    for (const [name, input] of Object.entries(this.inputs)) {
      if (!given.has(name)) continue;
      if (input.type === "checkbox") input.checked = given.get(name) === "1";
      else input.value = given.get(name);
    }
  }

  fillModel() {
    const shape = this.data.models[this.inputs.model.value];
    for (const name of Object.keys(MODEL_FIELDS)) this.inputs[name].value = shape[name];
    for (const name of ["gated", "tied"]) this.inputs[name].checked = shape[name];
    this.show();
  }

  fillMachine() {
    const device = this.data.devices[this.inputs.device.value];
    for (const [name, [, unit]] of Object.entries(MACHINE_FIELDS)) {
      this.inputs[name].value = device[name] / unit;
    }
    this.show();
  }

  // The inputs as numbers, and what is wrong with them.
  read() {
    const value = (name) => Number(this.inputs[name].value);
    const shape = { ...this.data.models[this.inputs.model.value], head_dim: 0 };
    const problems = [];
    for (const [name, label] of Object.entries(MODEL_FIELDS)) {
      shape[name] = value(name);
      const least = ["kv_heads", "ff_dim"].includes(name) ? 0 : 1;
      if (!Number.isInteger(shape[name]) || shape[name] < least) {
        problems.push(`${label} must be a whole number of ${least} or more.`);
      }
    }
    for (const name of ["gated", "tied"]) shape[name] = this.inputs[name].checked;
    const divides = (few, many) => {
      if (!(shape[many] % shape[few])) return;
      problems.push(`${MODEL_FIELDS[few]} (${shape[few]}) must divide ${MODEL_FIELDS[many]} (${shape[many]}).`);
    };
    divides("heads", "model_dim");
    if (shape.kv_heads) divides("kv_heads", "heads");
    if (shape.experts_per_token > shape.experts) {
      problems.push(`experts of a token must be at most the ${shape.experts} experts.`);
    }
    const machine = { ...this.data.devices[this.inputs.device.value] };
    for (const [name, [label, unit]] of Object.entries(MACHINE_FIELDS)) {
      machine[name] = value(name) * unit;
      if (!(machine[name] > 0)) problems.push(`${label} must be more than 0.`);
    }
    for (const [name, label] of [["nodes", "nodes"], ["samples", "sequences of a step"]]) {
      if (!Number.isInteger(value(name)) || value(name) < 1) {
        problems.push(`${label} must be a whole number of 1 or more.`);
      }
    }
    if (!Number.isInteger(machine.node)) problems.push("devices of a node must be a whole number.");
    Object.assign(machine, {
      devices: machine.node * value("nodes"),
      samples: value("samples"),
      offload: this.inputs.offload.checked,
    });
    if (machine.devices > 16384) problems.push("at most 16,384 devices here; use lightning-par search.");
    return { shape: complete(shape), machine, problems };
  }

  show() {
    const { shape, machine, problems } = this.read();
    if (problems.length) {
      this.output.replaceChildren(...problems.map((p) => make("p", { class: "layout-problem" }, p)));
      return;
    }
    const precision = this.inputs.precision.value;
    const code = this.data.code[precision];
    const found = choose(shape, machine, code, this.data.limits, this.data.rule);
    const [count, unit] = parameters(shape) < 1e9 ? [1e6, "million"] : [1e9, "billion"];
    const size = `${(parameters(shape) / count).toPrecision(3)} ${unit} parameters on ` +
      `${machine.devices} devices: ${found.considered} plain layouts, of which ${found.fitting} fit.`;
    const parts = [make("p", {}, size), make("p", {}, this.origins(shape, machine))];
    if (found.best) {
      parts.push(...this.layout(found, shape, machine, code, precision));
    } else {
      parts.push(make("p", { class: "layout-problem" }, this.refusal(found, machine)));
    }
    this.output.replaceChildren(...parts);
  }

  refusal(found, machine) {
    if (!found.considered) {
      return `${machine.samples} sequences do not divide over ${machine.devices} devices in any ` +
        "way. Use another number of sequences, or of nodes.";
    }
    const limit = gib(this.data.limits.margin * machine.memory);
    const needs = gib(found.least.held.peak);
    const more = machine.offload ? "" : ", or put the optimizer in CPU memory";
    return `None fits ${limit} (90 % of a device): the smallest, ${words(found.least.layout)}, ` +
      `needs ${needs}. Use more devices${more}.`;
  }

  // Where the numbers come from that decide.
  origins(shape, machine) {
    const model = this.data.models[this.inputs.model.value];
    const device = this.data.devices[this.inputs.device.value];
    const from = (same, name) => (same ? `from ${name}` : "as you said");
    const length = from(shape.length === model.length, this.inputs.model.value);
    const memory = from(machine.memory === device.memory, this.inputs.device.value);
    return `Tokens of a sequence: ${shape.length}, ${length}. Memory of a device: ` +
      `${machine.memory / 1e9} GB, ${memory}; a layout may take ${100 * this.data.limits.margin} % ` +
      `of it. Sequences of a step: ${machine.samples}, of all devices, from the form.`;
  }

  // The answer of `search` to a common question, or the command that gives it.
  fastest(shape, machine, precision) {
    const [model, device] = [this.inputs.model.value, this.inputs.device.value];
    const nodes = machine.devices / machine.node;
    const same = (ours, theirs) => Object.keys(theirs).every((name) => ours[name] === theirs[name]);
    const asked = { model, device, nodes, samples: machine.samples };
    const known = this.data.answers.find((one) => same(one, asked));
    const unchanged = same(shape, complete(this.data.models[model])) &&
      same(machine, this.data.devices[device]) && !machine.offload && precision === "bf16-mixed";
    if (known && unchanged) {
      const longer = 100 * (known.plain_seconds / known.fastest_seconds - 1);
      const times = `predicted: ${known.plain_seconds} and ${known.fastest_seconds} s a step`;
      return known.fastest === known.plain
        ? [make("p", {}, `lightning-par search gives the same layout: ${known.plain_seconds} s a step.`)]
        : [make("p", {}, `The fastest layout that lightning-par search finds is ${known.fastest}. ` +
            `The plain answer takes ${longer.toFixed(0)} % longer (${times}).`)];
    }
    const words = ["lightning-par search --config run.yaml", `--device ${device}`, `--nodes ${nodes}`,
      `--devices ${machine.node}`, `--length ${shape.length}`, `--samples ${machine.samples}`,
      `--trainer.precision ${precision}`, ...(machine.offload ? ["--offload"] : [])];
    return [
      make("p", {}, "Whether another layout is faster, and by how much, this command predicts:"),
      make("pre", {}, make("code", {}, words.join(" \\\n  "))),
    ];
  }

  layout(found, shape, machine, code, precision) {
    const { layout: best, held: whole } = found.best;
    const bytes = traffic(shape, best, code);
    const held = whole.ranks[whole.peak_rank];
    const where = best.sizes.pipeline > 1 ? `, pipeline rank ${whole.peak_rank}` : "";
    const parts = [
      make("p", { class: "layout-best" }, `Plain answer: ${words(best)}`),
      make("ul", {}, ...explain(best).map((line) => make("li", {}, line))),
      ...this.fastest(shape, machine, precision),
      bars(`Memory of the fullest device${where}: ${gib(whole.peak)} of ` +
        `${gib(machine.memory)}`, held, whole.peak < GIB ? MIB : GIB, machine.memory),
    ];
    if (whole.host) {
      parts.push(make("p", {}, `CPU memory for each device: ${gib(whole.host)}`));
    }
    if (sum(bytes)) parts.push(bars("Sent by a device in a step, GB", bytes, 1e9, sum(bytes)));
    parts.push(make("pre", {}, make("code", { class: "layout-yaml" }, yaml(best, machine, precision))));
    return parts;
  }
}

const AGAIN = {
  none: "Recomputation: none.",
  selective: "Recomputation: outputs of matrix products and of attention are kept, the rest is computed again.",
  full: "Recomputation: each block is computed again in the backward.",
};

// A layout in sentences.
function explain(l) {
  const s = l.sizes;
  const lines = [];
  const data = s.data_replicate * s.data_shard;
  if (s.tensor > 1) lines.push(`Each layer is divided over ${s.tensor} devices (tensor parallelism).`);
  if (s.pipeline > 1) lines.push(`The blocks are divided into ${s.pipeline} pipeline stages.`);
  if (s.context > 1) lines.push(`Each sequence is divided over ${s.context} devices.`);
  if (s.expert > 1) lines.push(`The experts are divided over ${s.expert} devices.`);
  lines.push(data === 1 ? "There is one replica." : `There are ${data} replicas.`);
  if (s.data_shard > 1) {
    const what = l.zero_stage === 3 ? "Weights, gradients and optimizer states" : "Optimizer states";
    const copies = s.data_replicate > 1 ? `, in ${s.data_replicate} copies` : "";
    lines.push(`${what} are sharded over ${s.data_shard} of them (ZeRO ${l.zero_stage})${copies}.`);
  }
  lines.push(`Micro-batches of a replica in a step: ${l.microbatches}; sequences in each: ${l.micro_batch}.`);
  lines.push(AGAIN[l.recompute]);
  return lines;
}

function bars(title, values, unit, whole) {
  const rows = Object.entries(values)
    .filter(([, value]) => value > 0)
    .map(([name, value]) =>
      make("tr", {},
        make("th", { scope: "row" }, PARTS[name] || name),
        make("td", {}, (value / unit).toPrecision(3)),
        make("td", { class: "layout-bar" },
          make("div", { style: `width: ${Math.min(100, (100 * value) / whole).toFixed(2)}%` }))));
  return make("table", { class: "layout-bars" }, make("caption", {}, title), make("tbody", {}, ...rows));
}

const place = document.getElementById("layout-calculator");
if (place) new Calculator(place, PLANNER);
