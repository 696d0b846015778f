// The page of a task: does the model still answer under evictions?

const kTaskNote = 'An answer is right if it is exactly the hidden text. Two shares are compared by an exact test over the ' +
  'samples that only one of the two policies answers right.';
const kTaskMeanings = [
  ['right answers', 'the share of questions that the model answers word for word'],
  ['log-likelihood', 'log-likelihood of the right answer, mean over the samples, in nats'],
  ['lost, gained', 'lost: among the samples that the first configuration answers right, the share that this one answers wrong; ' +
    'gained: among those that the first answers wrong, the share that this one answers right'],
  ['query-agnostic', 'the question comes after the eviction; in query-aware mode it comes before'],
];

function taskPage(data) {
  const {facts} = data;
  return {
    command: 'kvlab task',
    question: `Does ${shown(facts.model, 100)} still answer under evictions?`,
    context: `${named(facts.task)}; samples at each depth and length: ${facts.samples}, depths: ${facts.depths}, ` +
      `lengths: ${facts.lengths}. Choose below which of them to show.`,
    front: [...recommended(data.recommendations[0], facts.next, '', data), quiet(kTaskNote)],
    sections: [frontierSection(data), exploreSection(data, 'Answers against budget', data.description),
      section('What the metrics mean', '', terms(kTaskMeanings, {class: 'prose'})),
      section('Where this comes from', '', terms([['weights', code(facts.weights_xxh3)], ['seed', String(facts.seed)],
        ['kvlab', named(facts.kvlab)]]))],
  };
}
