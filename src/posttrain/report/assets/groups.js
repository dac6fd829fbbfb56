// The curves of a report: titles, hints, metrics and groups.

const CURVES = [
  [
    'Learning',
    [
      {
        title: 'Reward',
        hint: 'batch mean; the band is ± one standard deviation',
        lines: { 'reward/mean': 'sampled', 'eval/reward': 'held-out' },
        band: ['reward/mean', 'reward/std'],
      },
      {
        title: 'Accuracy',
        hint: 'share of responses judged right',
        format: 'percent',
        range: [0, 1],
        lines: { accuracy: 'sampled', 'eval/accuracy': 'held-out' },
      },
      {
        title: 'Solved within k answers',
        hint: 'share of tasks that one of k answers solves; where more answers solve more, there is something to learn',
        format: 'percent',
        range: [0, 1],
        lines: 'pass@',
      },
      {
        title: 'Different answers',
        hint: 'share of the answers to one task; falls as the policy settles',
        format: 'percent',
        range: [0, 1],
        lines: { distinct: 'different' },
      },
      {
        title: 'Spread within groups',
        hint: 'deviation of one task’s rewards',
        lines: { 'reward/group_std': 'mean of groups' },
      },
      {
        title: 'Groups',
        hint: 'trained on, or dropped by the selection',
        stack: { 'select/kept': 'kept', 'select/dropped': 'dropped' },
      },
      {
        title: 'Loss',
        hint: 'the minimised quantity; for a policy gradient its value means little',
        lines: { loss: 'learnt from', 'eval/loss': 'held-out' },
      },
      { title: 'Perplexity', hint: 'of held-out text', lines: { 'eval/perplexity': 'held-out' } },
      { title: 'Bits a byte', hint: 'of held-out text', lines: { 'eval/bits_per_byte': 'held-out' } },
    ],
  ],
  [
    'Critic',
    [
      {
        title: 'Explained variance',
        hint: 'share of the targets’ variance that the critic foresaw; 0 is a constant’s, below 0 it misleads',
        lines: { 'value/explained': 'explained' },
      },
      {
        title: 'Value loss',
        hint: 'how far V is from its targets, before this update has learnt them',
        lines: { 'value/loss': 'loss' },
      },
      {
        title: 'Value',
        needs: 'value/mean',
        hint: 'mean return that the critic expects, with the mean reward',
        lines: { 'value/mean': 'V', 'reward/mean': 'reward' },
      },
      {
        title: 'Gradient of the critic',
        hint: 'length of its own weights’ gradient, before clipping',
        lines: { 'value/grad_norm': 'norm' },
      },
      { title: 'Learning rate of the critic', lines: { 'value/lr': 'rate' } },
      { title: 'Warm-up', hint: '1 while the critic alone learns', lines: { 'value/warmup': 'warm-up' } },
    ],
  ],
  [
    'Preferences',
    [
      {
        title: 'Pairs in order',
        hint: 'how often the better answer is worth more to the policy, or to the reward model; 50% is chance',
        format: 'percent',
        range: [0, 1],
        lines: {
          'rewards/accuracy': 'learnt from',
          'eval/rewards/accuracy': 'held-out',
          'score/accuracy': 'learnt from',
          'eval/score/accuracy': 'held-out',
        },
      },
      {
        title: 'Margin',
        hint: 'difference in worth between the better answer and the other',
        lines: {
          'rewards/margin': 'learnt from',
          'eval/rewards/margin': 'held-out',
          'score/margin': 'learnt from',
          'eval/score/margin': 'held-out',
        },
      },
      {
        title: 'Implicit reward',
        hint: 'β log π/π_ref of an answer; chosen should rise above rejected, and both often fall',
        lines: { 'rewards/chosen': 'chosen', 'rewards/rejected': 'rejected', 'eval/rewards/chosen': 'chosen, held-out', 'eval/rewards/rejected': 'rejected, held-out' },
      },
      {
        title: 'Likelihood of answers',
        hint: 'mean log-probability of a token; chosen answers that grow unlikely are being displaced',
        lines: { 'logp/chosen': 'chosen', 'logp/rejected': 'rejected', 'eval/logp/chosen': 'chosen, held-out', 'eval/logp/rejected': 'rejected, held-out' },
      },
      {
        title: 'Scores of the reward model',
        hint: 'its numbers; only their differences mean something',
        lines: { 'score/chosen': 'chosen', 'score/rejected': 'rejected', 'eval/score/chosen': 'chosen, held-out', 'eval/score/rejected': 'rejected, held-out', 'score/mean': 'mean' },
      },
      {
        title: 'Accuracy by length',
        hint: 'held-out pairs whose better answer is the shorter one, and the longer one',
        format: 'percent',
        range: [0, 1],
        lines: { 'eval/accuracy_shorter': 'shorter', 'eval/accuracy_longer': 'longer' },
      },
      {
        title: 'Calibration error',
        hint: 'how far its confidence is from how often it is right',
        format: 'percent',
        lines: { 'eval/calibration_error': 'held-out' },
      },
      {
        title: 'Length bias',
        hint: 'above 0 longer answers score higher',
        range: [-1, 1],
        lines: { 'eval/length_bias': 'held-out' },
      },
    ],
  ],
  [
    'Verifier',
    [
      {
        title: 'Verdicts',
        hint: 'share of each class',
        format: 'percent',
        range: [0, 1],
        stack: 'verdict/',
      },
      {
        title: 'Reward with length',
        hint: 'correlation within groups; above 0 the longer answer to a task earns more',
        range: [-1, 1],
        lines: { 'hacking/length_correlation': 'correlation' },
      },
      {
        title: 'Tampering and failures',
        hint: 'verdicts “forbidden”, and episodes that could not be judged',
        format: 'percent',
        lines: {
          'hacking/forbidden': 'forbidden',
          'hacking/error_rate': 'no score',
          'eval/errors': 'no score, held-out',
        },
      },
      {
        title: 'Agreement with the reward',
        hint: 'how often a verifier ranks two answers to a task as the reward does; 50% is chance',
        format: 'percent',
        range: [0, 1],
        lines: 'agreement/',
      },
      {
        title: 'Form of the answers',
        hint: 'shares that do not know whether an answer is right; the rule Form pays compares them with the reward',
        format: 'percent',
        lines: 'probe/',
      },
      { title: 'Auditors', hint: 'mean scores that are recorded and never paid', lines: 'audit/' },
      { title: 'Parts of the reward', hint: 'mean scores, before their weights', lines: 'part/' },
    ],
  ],
  [
    'Search',
    [
      {
        title: 'Solved',
        hint: 'share of searches whose end was judged right',
        format: 'percent',
        range: [0, 1],
        lines: { 'search/solved': 'sampled', 'eval/search/solved': 'held-out' },
      },
      {
        title: 'Moves a search',
        hint: 'drawn, repeated ones included',
        lines: { 'search/moves': 'sampled', 'eval/search/moves': 'held-out' },
      },
      {
        title: 'Moves that led nowhere',
        hint: 'refused, of those drawn',
        format: 'percent',
        lines: { 'search/refused': 'sampled', 'eval/search/refused': 'held-out' },
      },
      {
        title: 'Moves to known states',
        hint: 'merged, of those followed',
        format: 'percent',
        lines: { 'search/merged': 'sampled', 'eval/search/merged': 'held-out' },
      },
      {
        title: 'Time in the prover',
        hint: 'of the time of searches; the rest is the model’s',
        format: 'percent',
        range: [0, 1],
        lines: { 'speed/prover_share': 'prover' },
      },
    ],
  ],
  [
    'Samplers',
    [
      {
        title: 'Lag',
        hint: 'updates by which tokens are older than the weights trained on them',
        lines: { 'lag/mean': 'mean', 'lag/max': 'oldest' },
      },
      {
        title: 'Samplers at work',
        hint: 'share of their time in which they had something to do',
        format: 'percent',
        range: [0, 1],
        lines: { 'samplers/busy': 'busy' },
      },
      {
        title: 'Groups in line',
        hint: 'at the end of the update; many that wait: the learner is slower, many that play: the samplers are',
        stack: { 'samplers/waiting': 'wait to be trained on', 'samplers/playing': 'are being played' },
      },
      { title: 'Samplers restarted', hint: 'since the run began', lines: { 'samplers/restarts': 'restarts' } },
    ],
  ],
  [
    'Policy',
    [
      {
        title: 'KL',
        hint: 'nats per token',
        lines: { 'kl/ref': 'to reference', 'kl/old': 'to old policy', 'kl/mismatch': 'to sampler' },
      },
      { title: 'Entropy', hint: 'nats per token', lines: { entropy: 'entropy' } },
      {
        title: 'Response length',
        hint: 'tokens',
        lines: { 'length/mean': 'mean', 'length/max': 'longest', 'eval/length': 'held-out' },
      },
      {
        title: 'Cut by the limit',
        hint: 'share of responses that never ended',
        format: 'percent',
        lines: { 'length/clipped': 'cut' },
      },
      {
        title: 'Groups that teach nothing',
        hint: 'of those trained on: every advantage is 0',
        format: 'percent',
        range: [0, 1],
        lines: { 'advantage/zero': 'of groups' },
      },
      {
        title: 'Clip fraction',
        hint: 'tokens whose gradient the ratio clip removed',
        format: 'percent',
        lines: { 'clip/fraction': 'clipped' },
      },
      { title: 'Gradient norm', hint: 'before clipping', lines: { grad_norm: 'norm' } },
      { title: 'Learning rate', lines: { lr: 'rate' } },
      {
        title: 'Effective sample size',
        hint: '1 = sampled from the trained policy itself',
        range: [0, 1],
        lines: { ess: 'share' },
      },
    ],
  ],
  [
    'Machine',
    [
      {
        title: 'Time per update',
        hint: 'by phase',
        format: 'duration',
        stack: {
          'time/sample': 'sample',
          'time/feed': 'wait for samplers',
          'time/verify': 'verify',
          'time/score': 'score',
          'time/train': 'train',
          'time/publish': 'publish',
          'time/eval': 'evaluate',
          'time/checkpoint': 'checkpoint',
        },
        total: 'time/total',
      },
      {
        title: 'Speed',
        hint: 'tokens per second',
        lines: { 'speed/sample_tokens': 'sampling', 'speed/train_tokens': 'training' },
      },
      {
        title: 'Model FLOPs',
        hint: 'TFLOP per second and device',
        lines: { 'speed/train_tflops': 'training' },
      },
      {
        title: 'MFU',
        hint: 'share of the peak of the GPU',
        lines: { 'speed/mfu': 'training' },
      },
      {
        title: 'Memory',
        hint: 'peak, GiB',
        lines: { 'memory/peak': 'of the process' },
      },
    ],
  ],
];

// Introductions of groups whose name needs one.
const GROUP_SAYS = {
  Critic:
    'A critic learns V, the expected return from a token on; advantages compare returns with it. ' +
    'If it explains nothing, they are as noisy as without it. The rollouts below can be coloured by V.',
  Preferences:
    'Learnt from answers that were compared or judged. The order of training pairs should rise before that of held-out ' +
    'pairs; if only the first rises, the pairs are memorised.',
};
