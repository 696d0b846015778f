// Debian's Vega consists of modules that require each other by name. This code provides them without a network.
const vegaModules = {};
function vegaModule(name, body) {
  const module = {exports: {}};
  body.call({}, module.exports, module, (wanted) => vegaModules[wanted]);
  vegaModules[name] = module.exports;
}
function joinedVega() {
  // Registers the transforms of the other modules with vega-dataflow, because vega-dataflow runs only those.
  Object.assign(vegaModules['vega-dataflow'].transforms, vegaModules['vega-encode'],
    vegaModules['vega-transforms'], vegaModules['vega-view-transforms']);
  return {
    View: vegaModules['vega-view'].View,
    parse: vegaModules['vega-parser'].parse,
    expressionInterpreter: vegaModules['vega-interpreter'].expressionInterpreter,
  };
}
