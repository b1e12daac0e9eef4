// What is wrong with how the open page looks, as a list of texts.
(() => {
  const found = new Set();
  const root = document.documentElement;
  if (root.scrollWidth > root.clientWidth)
    found.add(`wider than the window: ${root.scrollWidth} of ${root.clientWidth}`);
  for (const picture of document.images)
    if (picture.complete && !picture.naturalWidth) found.add(`no picture: ${picture.src}`);

  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  // Any color of CSS as red, green, blue and opacity.
  const colors = new Map();
  const parts = (color) => {
    if (!colors.has(color)) {
      canvas.clearRect(0, 0, 1, 1);
      canvas.fillStyle = color;
      canvas.fillRect(0, 0, 1, 1);
      const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
      colors.set(color, [r, g, b, a / 255]);
    }
    return colors.get(color);
  };
  const over = ([r, g, b, a], [R, G, B]) =>
    [[r, R], [g, G], [b, B]].map(([top, below]) => top * a + below * (1 - a));
  // Relative luminance and contrast as WCAG 2.1 defines them.
  const light = (color) => {
    const [r, g, b] = color.map((c) =>
      c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const contrast = (one, other) => {
    const [low, high] = [light(one), light(other)].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  };
  const behind = (element) => {
    const layers = [];
    for (let at = element; at; at = at.parentElement) {
      layers.push(parts(getComputedStyle(at).backgroundColor));
      if (layers.at(-1)[3] === 1) break;
    }
    return layers.reverse().reduce((below, top) => over(top, below), [255, 255, 255]);
  };
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const element = texts.currentNode.parentElement;
    const shown = { checkOpacity: true, checkVisibilityCSS: true };
    if (!texts.currentNode.data.trim() || !element.checkVisibility(shown)) continue;
    const style = getComputedStyle(element);
    const size = parseFloat(style.fontSize);
    if (!size) continue;
    const below = behind(element);
    const [r, g, b, a] = parts(style.color);
    let opacity = a;
    for (let at = element; at; at = at.parentElement) opacity *= getComputedStyle(at).opacity;
    const ratio = contrast(over([r, g, b, opacity], below), below);
    const large = size >= 24 || (size >= 18.66 && style.fontWeight >= 700);
    if (ratio < (large ? 3 : 4.5)) {
      const name = `${element.tagName.toLowerCase()}.${[...element.classList].join(".")}`;
      const within = element.closest("[class]")?.getAttribute("class") ?? "the page";
      found.add(`contrast ${ratio.toFixed(2)} of ${name} in ${within}: ${texts.currentNode.data.trim().slice(0, 30)}`);
    }
  }
  return [...found];
})();
