// The page of a plan: which format each layer's keys and values have, and why.

const kPlanNote = 'The loss of a plan is nearly the sum of the losses of its parts, so the plan with the lowest sum is chosen. ' +
  'Joint: one replay of the whole plan, without that assumption. Measured: KL to the full cache in 16 bit, end to end.';
const kPartNote = 'Each point is the loss when only this part of this layer is quantized. A layer whose points lie far above the ' +
  'others needs more bits. Diamonds: the formats of the plan. A part without a diamond stays in 16 bit.';
const kBitsNote = 'Lower and further left is better. Bits include scales and minima; 16-bit keys and values have 16.';

/** A loss with its standard error: the measured KL if there is one, else the joint estimate. */
function lossText({measured_kl: kl, measured_kl_error: error, joint, joint_error: jointError, sum_of_losses: sum}) {
  return kl !== null ? averageText({mean: kl, error: error ?? NaN}) : averageText({mean: joint ?? sum, error: jointError ?? NaN});
}

function singleName({uniform}) {
  const [keys, values] = uniform.tiers.split('/');
  return values ? `keys in format ${keys} and values in format ${values} in all layers` : `format ${uniform.tiers} in all layers`;
}

/** The sentence that says what was chosen, and how it compares with the best single format of at most the same bits. */
function planAnswer(facts) {
  const {model, metric, plan, uniform, is_plan: byLayer} = facts, chosen = byLayer ? plan : uniform, other = byLayer ? uniform : plan;
  const names = byLayer ? ['formats by layer', singleName(facts)] : [singleName(facts), 'formats by layer'];
  const loss = plan.measured_kl !== null ? 'a measured KL' : `an expected loss (${metric})`;
  const size = `at ${numberText(chosen.bits)} bits per element (${numberText(chosen.bits / 0.16)}% of 16 bit)`;
  if (plan.tiers === uniform.tiers)
    return answer(`For ${shown(model, 100)}, the best plan is `, strong(singleName(facts)), ` ${size}. It has ${loss} of ` +
      `${lossText(chosen)}.`);
  return answer(`For ${shown(model, 100)}, use `, strong(names[0]), ` ${size}, with ${loss} of ${lossText(chosen)}. With ` +
    `${names[1]}, at ${numberText(other.bits)} bits, it is ${lossText(other)}.`);
}

function choicesTable(facts) {
  const cell = (value, error) => (value === null ? '–' : {content: averageText({mean: value, error: error ?? NaN}), value, error});
  const row = (name, one) => [named(name), numberCell(one.bits), numberCell(one.sum_of_losses), cell(one.joint, one.joint_error),
    cell(one.measured_kl, one.measured_kl_error)];
  return section('The plan and the best single format', kPlanNote, dataTable(['', 'bits', 'sum of losses', 'joint', 'measured KL'],
    [row('plan by layer', facts.plan), row(singleName(facts), facts.uniform)], {texts: ['']}));
}

function layersTable({layers}) {
  const range = ({from, to}) => (from === to ? String(from) : `${from} to ${to}`);
  return section('Formats by layer', '', dataTable(['layers', 'keys', 'values', 'bits', 'loss of keys', 'loss of values'],
    layers.map((one) => [range(one), named(one.keys), named(one.values), numberCell(one.bits), numberCell(one.key_loss),
      numberCell(one.value_loss)]), {texts: ['layers', 'keys', 'values']}));
}

function centreText(centre) {
  if (centre === 'none') return 'no';
  return centre === 'prompt' ? 'yes, by the prompt’s mean' : `yes, by the vectors of ${shown(centre.slice(1), 100)}`;
}

function planPage(data) {
  const {facts} = data;
  return {
    command: 'kvlab plan',
    question: `How many bits do the keys and values of ${shown(facts.model, 100)} need?`,
    front: [planAnswer(facts), nextCommand(facts.next)],
    sections: [figuresSection('Loss against bits', kBitsNote, figuresOf(data, 'bits')), choicesTable(facts), layersTable(facts),
      figuresSection('Loss of each layer', kPartNote, figuresOf(data, 'keys', 'values')),
      section('Where this comes from', '', terms([['weights', code(facts.weights_xxh3)], ['metric', code(facts.metric)],
        ['centred keys', centreText(facts.centre)]]))],
  };
}
