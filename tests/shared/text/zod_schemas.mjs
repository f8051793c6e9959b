// node zod_schemas.mjs > zod_schemas.json, in a folder with `npm install zod@4.6.7`.
import * as z from "zod";
const T = {
 string: z.string(), minmax: z.string().min(2).max(9), length: z.string().length(3), regex: z.string().regex(/^[A-Z]{2}-\d{3}$/), search: z.string().regex(/ab+c/),
 startsWith: z.string().startsWith("ab"), endsWith: z.string().endsWith("yz"), includes: z.string().includes("q"), lower: z.string().lowercase(), upper: z.string().uppercase(),
 email: z.email(), uuid: z.uuid(), uuidv7: z.uuidv7(), guid: z.guid(), url: z.url(), httpUrl: z.httpUrl(), hostname: z.hostname(), emoji: z.emoji(), base64: z.base64(), base64url: z.base64url(), hex: z.hex(), jwt: z.jwt(),
 nanoid: z.nanoid(), cuid: z.cuid(), cuid2: z.cuid2(), ulid: z.ulid(), xid: z.xid(), ksuid: z.ksuid(), ipv4: z.ipv4(), ipv6: z.ipv6(), cidrv4: z.cidrv4(), cidrv6: z.cidrv6(), mac: z.mac(), e164: z.e164(),
 isodate: z.iso.date(), isotime: z.iso.time(), isodatetime: z.iso.datetime(), isooffset: z.iso.datetime({offset:true}), isolocal: z.iso.datetime({local:true}), isoprecision: z.iso.datetime({precision:3}), isoduration: z.iso.duration(),
 number: z.number(), int: z.int(), int32: z.int32(), uint32: z.uint32(), float32: z.float32(), float64: z.float64(), gte: z.number().gte(0.5).lte(7), positive: z.number().positive(), negative: z.number().negative(), nonneg: z.number().nonnegative(), multiple: z.number().multipleOf(0.25), multint: z.int().multipleOf(5), safe: z.number().int().min(0).max(150), tiny: z.number().min(Number.MIN_VALUE),
 boolean: z.boolean(), nul: z.null(), literal: z.literal("a"), literalnum: z.literal([1,2,5]), literalnull: z.literal(null), literalbool: z.literal(true), enum: z.enum(["red","green","blue"]), nativeEnum: z.enum({A:1,B:2}), templ: z.templateLiteral(["id-", z.number()]), templ2: z.templateLiteral([z.enum(["px","em"]), "-", z.string()]),
 any: z.any(), unknown: z.unknown(), array: z.array(z.string()), arraymm: z.array(z.int()).min(1).max(3), nonempty: z.array(z.boolean()).nonempty(), tuple: z.tuple([z.string(), z.int()]), tuplerest: z.tuple([z.string()], z.boolean()), 
 record: z.record(z.string(), z.int()), recordenum: z.record(z.enum(["a","b"]), z.boolean()), partialrecord: z.partialRecord(z.enum(["a","b"]), z.boolean()), recordregex: z.record(z.string().regex(/^k\d$/), z.int()), recordfew: z.record(z.string().regex(/^(x|y)$/), z.int()), recordlen: z.record(z.string().max(2), z.int()), looserecord: z.looseRecord(z.string().regex(/^S_/), z.int()),
 object: z.object({a: z.string(), b: z.int().optional()}), strict: z.strictObject({a: z.string(), b: z.int().optional()}), loose: z.looseObject({a: z.int()}), catchall: z.object({a: z.int()}).catchall(z.string()), empty: z.object({}), strictempty: z.strictObject({}), partial: z.object({a: z.int(), b: z.boolean()}).partial(),
 union: z.union([z.string(), z.int()]), discriminated: z.discriminatedUnion("type", [z.object({type: z.literal("a"), v: z.int()}), z.object({type: z.literal("b"), w: z.string()})]), intersection: z.intersection(z.object({a: z.int()}), z.object({b: z.string()})), nullable: z.string().nullable(), nullish: z.object({a: z.int().nullish()}), def: z.object({a: z.int().default(3)}), readonly: z.array(z.int()).readonly(), described: z.string().describe("text").meta({title:"T"}), xor: z.xor([z.string(), z.int()]),
 lazy: z.object({name: z.string(), get kids(){ return z.array(T0); }}), json: z.json(),
};
var T0 = z.object({n: z.int(), get next(){ return T0.optional(); }});
T.recursive = T0;
const out = {};
for (const [name, type] of Object.entries(T)) {
  const { $schema, ...output } = { ...z.toJSONSchema(type) };
  const { $schema: _, ...input } = { ...z.toJSONSchema(type, { io: "input" }) };
  out[name] = output;
  if (JSON.stringify(input) !== JSON.stringify(output)) out[name + "_input"] = input;
}
const lines = Object.entries(out).map(([name, schema]) => `${JSON.stringify(name)}: ${JSON.stringify(schema)}`);
console.log("{\n" + lines.join(",\n") + "\n}");
