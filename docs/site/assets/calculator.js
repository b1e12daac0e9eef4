// The form of which_layout.md: reads the inputs, asks layouts.js, shows sizes, memory and YAML.
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
  link: ["links inside a node, GB/s", 1e9],
  network: ["network, GB/s of a device", 1e9],
};
const FIRST = { model: "llama3-8b", device: "h100", precision: "bf16-mixed" };

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
          check("offload", "optimizer on the host"),
        ),
      ),
      this.output,
    );
    this.inputs.model.addEventListener("change", () => this.fillModel());
    this.inputs.device.addEventListener("change", () => this.fillMachine());
    root.addEventListener("submit", (event) => event.preventDefault());
    root.addEventListener("input", () => this.show());
    this.fillModel();
    this.fillMachine();
    this.show();
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
    const found = choose(shape, machine, code, this.data.limits, 4);
    const [count, unit] = parameters(shape) < 1e9 ? [1e6, "million"] : [1e9, "billion"];
    const size = `${(parameters(shape) / count).toPrecision(3)} ${unit} parameters on ` +
      `${machine.devices} devices: ${found.considered} layouts, of which ${found.fitting} fit.`;
    const parts = [make("p", {}, size)];
    if (found.best.length) {
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
    const more = machine.offload ? "" : ", or put the optimizer on the host";
    return `None fits ${limit} (90 % of a device): the smallest, ${words(found.least.layout)}, ` +
      `needs ${needs}. Use more devices${more}.`;
  }

  layout(found, shape, machine, code, precision) {
    const [best, ...others] = found.best;
    const bytes = traffic(shape, best.layout, code);
    const held = best.held.ranks[best.held.peak_rank];
    const where = best.layout.sizes.pipeline > 1 ? `, pipeline rank ${best.held.peak_rank}` : "";
    const text = yaml(best.layout, machine, precision);
    const parts = [
      make("p", { class: "layout-best" }, words(best.layout)),
      make("p", {}, `Micro-batches of a replica in a step: ${best.layout.microbatches}; ` +
        `sequences in each: ${best.layout.micro_batch}.`),
      bars(`Memory of the fullest device${where}: ${gib(best.held.peak)} of ` +
        `${gib(machine.memory)}`, held, best.held.peak < GIB ? MIB : GIB, machine.memory),
    ];
    if (best.held.host) {
      parts.push(make("p", {}, `On the host, for each of its devices: ` +
        gib(best.held.host)));
    }
    if (sum(bytes)) parts.push(bars("Sent by a device in a step, GB", bytes, 1e9, sum(bytes)));
    parts.push(make("pre", {}, make("code", { class: "layout-yaml" }, text)));
    if (others.length) {
      const rows = others.map(({ layout, held: h }) =>
        make("li", {}, `${words(layout)}: ${gib(h.peak)}`));
      parts.push(make("p", {}, "Near to it:"), make("ul", {}, ...rows));
    }
    return parts;
  }
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
    ["ep", s.expert],
  ];
  const sizes = axes.filter(([, size]) => size > 1).map(([axis, size]) => `${axis} ${size}`);
  const said = [sizes.join(" x ") || "1 device", `zero ${l.zero_stage}`];
  said.push(`${l.microbatches} x ${l.micro_batch}`, `recompute ${l.recompute}`);
  return said.concat(l.offload ? ["offload"] : []).join(", ");
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
