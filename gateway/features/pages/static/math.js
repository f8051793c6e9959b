// Math as MathML, from TeX. Temml reads the TeX; of its tree only the elements, attributes and styles named here become
// nodes, so that math can neither link nor load anything, and has the colours of the page.

import { el } from "/dom.js";

const FOLDER = "/vendor/temml-0.13.5";
const NAMESPACE = "http://www.w3.org/1998/Math/MathML";
const MOST = 5000; // characters
const DEEPEST = 100; // elements in elements
const ELEMENTS = new Set(
  ("math mrow mi mn mo ms mtext mspace mstyle mfrac msqrt mroot msub msup msubsup munder mover munderover mmultiscripts " +
    "mprescripts none mtable mtr mtd mpadded mphantom menclose").split(" "),
);
const ATTRIBUTES = new Set(
  ("display displaystyle scriptlevel stretchy symmetric fence separator form lspace rspace minsize maxsize largeop " +
    "movablelimits accent accentunder mathvariant linethickness width height depth voffset notation columnalign columnspan " +
    "rowspan columnspacing rowspacing columnlines rowlines rowalign").split(" "),
);
const STYLES = /^(display|padding|border|margin|verticalAlign|textAlign|fontWeight|fontStyle|width|height|mathDepth)/;

let temml = null;
let loading = null;

// An element with a formula, or with its source if it is no TeX.
export function mathOf(source, isDisplay) {
  const element = el(isDisplay ? "div" : "span", { className: isDisplay ? "math display" : "math" });
  if (isDisplay) element.tabIndex = 0; // it may be wider than the page
  show(element, source, isDisplay);
  return element;
}

function show(element, source, isDisplay) {
  const formula = temml && formulaOf(source, isDisplay);
  element.replaceChildren(formula ?? el("code", { textContent: source }));
  if (temml === null) loadMath().then(() => temml && show(element, source, isDisplay));
}

export function loadMath() {
  loading ??= import(`${FOLDER}/temml.min.mjs`).then(
    (module) => {
      document.head.append(el("link", { rel: "stylesheet", href: `${FOLDER}/temml.css` }));
      temml = module.default;
    },
    () => (loading = null),
  );
  return loading;
}

function formulaOf(source, isDisplay) {
  if (source.length > MOST) return null;
  try {
    const options = { displayMode: isDisplay, throwOnError: true, maxSize: [50, 50] };
    return nodeOf(temml.__renderToMathMLTree(source, options), DEEPEST);
  } catch {
    return null; // no TeX, or too deep
  }
}

// `room`: how many elements may still be inside of each other.
function nodeOf({ type, text, attributes, style, classes, children = [] }, room) {
  if (room === 0) throw new RangeError("too deep");
  if (typeof text === "string") return document.createTextNode(text);
  const inner = children.filter(Boolean).map((child) => nodeOf(child, room - 1));
  if (!ELEMENTS.has(type)) {
    const fragment = document.createDocumentFragment();
    fragment.append(...inner);
    return fragment;
  }
  const element = document.createElementNS(NAMESPACE, type);
  for (const [name, value] of Object.entries(attributes ?? {})) if (ATTRIBUTES.has(name)) element.setAttribute(name, value);
  for (const [name, value] of Object.entries(style ?? {})) if (STYLES.test(name)) element.style[name] = value;
  if (classes?.length) element.setAttribute("class", classes.join(" "));
  element.append(...inner);
  return element;
}
