// Texts about the JSON schemas of an OpenAPI document.

// Follows references: returns the part of the document `api` that `part` refers to, or `part` itself.
export function resolve(api, part) {
  let found = part;
  while (found?.$ref) found = found.$ref.slice(2).split("/").reduce((at, key) => at?.[key], api);
  return found ?? {};
}

const json = (value) => JSON.stringify(value);
const of = (low, high, unit) => {
  if (low === undefined && high === undefined) return "";
  if (low === undefined) return ` of at most ${high} ${unit}`;
  return high === undefined ? ` of at least ${low} ${unit}` : ` of ${low} to ${high} ${unit}`;
};

// Type and range of a value in words. Null, which counts as absent, is left out.
export function kindOf(api, schema, depth = 0) {
  if (schema.$ref && depth > 0) return schema.$ref.split("/").pop();
  const found = resolve(api, schema);
  if ("const" in found) return json(found.const);
  if (found.enum) return found.enum.filter((value) => value !== null).map(json).join(", ") || "null";
  const choices = (found.anyOf ?? found.oneOf)?.filter((one) => one.type !== "null");
  if (choices && !found.type) return choices.map((one) => kindOf(api, one, depth + 1)).join(" or ");
  const types = [found.type].flat().filter((type) => type && type !== "null");
  return types.map((type) => typed(api, found, type, depth)).join(" or ") || "null";
}

function typed(api, schema, type, depth) {
  if (type === "string") return `string${of(schema.minLength, schema.maxLength, "characters")}`;
  if (type === "integer" || type === "number") {
    const { minimum, maximum, exclusiveMinimum } = schema;
    if (exclusiveMinimum !== undefined) return `${type} over ${exclusiveMinimum}`;
    if (minimum === undefined) return type;
    return maximum === undefined ? `${type} from ${minimum}` : `${type} from ${minimum} to ${maximum}`;
  }
  if (type === "array") {
    const items = schema.items && depth < 3 ? ` of ${kindOf(api, schema.items, depth + 1)}` : "";
    return `array${items}${schema.maxItems ? `, at most ${schema.maxItems}` : ""}`;
  }
  if (type === "object" && schema.properties && depth > 0) return `{${Object.keys(schema.properties).join(", ")}}`;
  return type;
}
