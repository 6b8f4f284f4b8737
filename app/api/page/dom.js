// Building nodes. Text goes into text nodes only, so that nothing in it is read as HTML.

export const find = (id) => document.getElementById(id);

/** An element with properties, `data` attributes and children, which are nodes or texts. */
export function element(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  const { data = {}, attributes = {}, ...rest } = properties;
  Object.assign(node, rest);
  Object.assign(node.dataset, data);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

/** The same for SVG, where everything is an attribute. */
export function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}
