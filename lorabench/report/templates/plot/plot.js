// What the page uses of Observable Plot 0.6.17, with the parts of d3 that this needs; plot.min.js is made of it:
//   npm install @observablehq/plot@0.6.17 esbuild@0.28
//   npx esbuild plot.js --bundle --minify --format=iife --global-name=Plot --outfile=plot.min.js
export {
  plot, barX, dot, line, ruleX, ruleY, rect, text, tip, tickX, tickY, axisX, axisY, gridX, pointer, pointerX, pointerY,
} from "@observablehq/plot";
