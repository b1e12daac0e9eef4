// Answers searches as the site does: the theme's own worker ranks them.
// node search.js SITE < queries.json > pages.json: of every query the pages, the best first.
const fs = require("fs");
const path = require("path");
const site = process.argv[2];
const workers = path.join(site, "assets", "javascripts", "workers");
const worker = fs.readdirSync(workers).find((name) => /^search.*\.js$/.test(name));
const index = JSON.parse(fs.readFileSync(path.join(site, "search.json")));

// What a browser gives a worker: it posts to `self`, and is sent messages by `onmessage`.
let answered;
globalThis.self = { postMessage: (message) => answered(message) };
const ask = (message) => new Promise((done) => {
  answered = done;
  self.onmessage({ data: message });
});
new Function(fs.readFileSync(path.join(workers, worker), "utf8"))();

(async () => {
  const READY = 1, SETUP = 0, QUERY = 2, RESULT = 3;
  const ready = await ask({ type: SETUP, data: index });
  if (ready.type !== READY) throw new Error("the worker does not take the index");
  const pages = {};
  for (const query of JSON.parse(fs.readFileSync(0))) {
    const found = await ask({ type: QUERY, data: { input: query } });
    if (found.type !== RESULT) throw new Error(`the worker does not answer ${query}`);
    pages[query] = found.data.items.map(({ id }) => index.items[id].location);
  }
  process.stdout.write(JSON.stringify(pages));
})();
