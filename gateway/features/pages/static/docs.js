// The page of the API: renders /openapi.json as one section per tag, and one <details> per endpoint.

import { $, el } from "/dom.js";
import { kindOf, resolve } from "/api-schema.js";
import { initKey } from "/key.js";

const code = (text) => el("code", { textContent: text });

function table(heads, rows) {
  const head = el("tr", {}, ...heads.map((text) => el("th", { scope: "col", textContent: text })));
  const body = rows.map((cells) => el("tr", {}, ...cells));
  return el("table", {}, el("thead", {}, head), el("tbody", {}, ...body));
}

const cell = (content, className = "") => el("td", { className }, content);

// The rows of an object's properties: name, type and range, default, meaning.
function properties(api, schema) {
  const required = schema.required ?? [];
  return Object.entries(schema.properties ?? {}).map(([name, property]) => {
    const known = "default" in property ? JSON.stringify(property.default) : "";
    const fallback = required.includes(name) ? "required" : known;
    const kind = kindOf(api, property, 1);
    return [cell(code(name)), cell(kind, "kind"), cell(fallback), cell(property.description ?? "")];
  });
}

function parameters(api, operation) {
  return (operation.parameters ?? []).map((one) => {
    const { name, in: place, schema, description } = resolve(api, one);
    return [cell(code(name)), cell(place), cell(kindOf(api, schema), "kind"), cell(description ?? "")];
  });
}

// The schema of an answer, or of the data of an event.
const answerOf = (schema) => schema.properties?.data?.contentSchema ?? schema;

function answers(api, operation) {
  return Object.entries(operation.responses).map(([status, reference]) => {
    const { description, content } = resolve(api, reference);
    const kinds = Object.entries(content ?? {}).map(([type, { schema }]) => {
      const inner = answerOf(schema);
      return inner.$ref ? `${type}: ${inner.$ref.split("/").pop()}` : type;
    });
    return [cell(code(status)), cell(description), cell(kinds.join("; "), "kind")];
  });
}

function endpoint(api, path, method, operation) {
  const parts = [];
  const add = (title, heads, rows) => rows.length && parts.push(el("h3", { textContent: title }), table(heads, rows));
  add("Path, query and headers", ["name", "in", "type", "what"], parameters(api, operation));
  const fields = ["name", "type and range", "default", "what"];
  // A body is JSON, or a form: /v1/files.
  const request = Object.values(operation.requestBody?.content ?? {})[0]?.schema;
  if (request) add("Body", fields, properties(api, resolve(api, request)));
  add("Answers", ["status", "what", "type"], answers(api, operation));
  for (const { schema } of Object.values(resolve(api, operation.responses[200]).content ?? {})) {
    const inner = answerOf(schema);
    if (inner.$ref) add(inner.$ref.split("/").pop(), fields, properties(api, resolve(api, inner)));
  }
  const summary = el("summary", {}, el("span", { className: "method", textContent: method.toUpperCase() }), code(path),
    el("span", { className: "quiet", textContent: operation.summary }));
  const block = el("details", { id: operation.operationId }, summary, el("div", {}, ...parts));
  return { block, text: block.textContent.toLowerCase() };
}

function show(api) {
  $("title").textContent = `${api.info.title} ${api.info.version}`;
  $("about").textContent = api.info.description;
  const sections = new Map();
  for (const [path, operations] of Object.entries(api.paths)) {
    for (const [method, operation] of Object.entries(operations)) {
      const tag = operation.tags[0];
      if (!sections.has(tag)) sections.set(tag, []);
      sections.get(tag).push(endpoint(api, path, method, operation));
    }
  }
  const shown = [...sections].map(([tag, endpoints]) => {
    const section = el("section", {}, el("h2", { textContent: tag }), ...endpoints.map(({ block }) => block));
    return { section, endpoints };
  });
  $("endpoints").append(...shown.map(({ section }) => section));
  const filter = () => {
    const wanted = $("filter").value.trim().toLowerCase();
    let count = 0;
    for (const { section, endpoints } of shown) {
      for (const { block, text } of endpoints) block.hidden = !text.includes(wanted);
      const found = endpoints.filter(({ block }) => !block.hidden).length;
      section.hidden = found === 0;
      count += found;
    }
    $("status").textContent = `${count} ${count === 1 ? "endpoint" : "endpoints"}`;
  };
  $("filter").addEventListener("input", filter);
  filter();
  const named = location.hash && $(location.hash.slice(1));
  if (named instanceof HTMLDetailsElement) {
    named.open = true;
    named.scrollIntoView();
  }
}

initKey(); // for the other pages: this one needs no key
try {
  const response = await fetch("/openapi.json");
  if (!response.ok) throw new Error(`the status is ${response.status}`);
  show(await response.json());
} catch (error) {
  $("status").textContent = `The document cannot be loaded: ${error.message}`;
  $("status").classList.add("error");
}
