// node site_search.js WORKER.js INDEX.json QUERY...: runs the site's own search worker and prints the locations found for each query as JSON.
const fs = require("fs");
const [worker, index, ...queries] = process.argv.slice(2);
const answers = [];
globalThis.self = globalThis;
globalThis.postMessage = (message) => {
  if (message.type === 4) throw new Error("the worker has failed");
  if (message.type === 3) {
    const items = JSON.parse(fs.readFileSync(index)).items;
    answers.push(message.data.items.map((item) => items[item.id].location));
  }
  const query = queries[answers.length];
  if (query === undefined) console.log(JSON.stringify(answers));
  else setTimeout(() => self.onmessage({ data: { type: 2, data: { input: query, page: { size: 10 } } } }));
};
eval(fs.readFileSync(worker, "utf8"));
self.onmessage({ data: { type: 0, data: JSON.parse(fs.readFileSync(index)) } });
